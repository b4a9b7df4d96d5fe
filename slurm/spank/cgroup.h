/* What `cgroup.c` does for the plugin; see there. */
#ifndef TANGRAM_CGROUP_H
#define TANGRAM_CGROUP_H

#include <sys/types.h>

/* Reports what did not work, and why: one line, without a newline. */
typedef void say_f(const char *format, ...) __attribute__((format(printf, 1, 2)));

#pragma GCC visibility push(hidden)

/* Makes a cgroup `name` for the user. Version 1: beneath the cgroup of `task`, which is moved into it,
 * in each hierarchy that limits something. Version 2: beside the cgroup of `task`. Returns the number
 * of hierarchies. */
int delegate(pid_t task, uid_t uid, gid_t gid, const char *name, say_f *say);

/* Kills all processes in the cgroups that were made, and removes them. Blocks for up to two seconds. */
void undelegate(say_f *say);

#pragma GCC visibility pop

#endif
