/* What `cgroup.c` does for the plugin; see there. */
#ifndef TANGRAM_CGROUP_H
#define TANGRAM_CGROUP_H

#include <sys/types.h>

/* Says what did not work, and why; one line, no newline. */
typedef void say_f(const char *format, ...) __attribute__((format(printf, 1, 2)));

#pragma GCC visibility push(hidden)

/* Makes a cgroup `name` for the user: of version 1 beneath that of `task`, which is moved in, in each
 * hierarchy that limits something; of version 2 beside it. Returns in how many. */
int delegate(pid_t task, uid_t uid, gid_t gid, const char *name, say_f *say);

/* Kills what lives in the cgroups made, and removes them. Blocks, two seconds at most. */
void undelegate(say_f *say);

#pragma GCC visibility pop

#endif
