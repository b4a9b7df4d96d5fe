/* Makes and removes the cgroups that a step's user owns. With version 1 there is one beneath the
 * step's own cgroup in each hierarchy that limits something; with version 2 there is one beside the
 * task's cgroup.
 *
 * Security: this code runs as root, so it does little, and uses no name from a user. It acts only
 * beneath the cgroup in which Slurm has put the task, on a cgroup file system, which has no links, and
 * reaches everything from there by descriptors. (Slurm makes the user owner of a step's folders, but
 * not of the files in them. So other steps of the user may make, remove and rename cgroups beneath
 * meanwhile; but they can replace ours only by other cgroups of the same user beneath the same
 * cgroup.) The user becomes owner of the folder that is made here and of the two files by which
 * processes are moved in, never of a file that limits: the user cannot exceed what Slurm allowed the
 * step.
 *
 * No task is moved to where Slurm cannot see it: Slurm signals and ends the processes in its own
 * cgroup, and not those in cgroups beneath. Where Slurm tracks a step by its freezer cgroup, the
 * freezer is left alone. With version 2, where one cgroup has all controllers, the task stays where
 * it is, and its children may move to the cgroup beside it.
 */
#define _GNU_SOURCE
#include "cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

enum { MADE_MAX = 16, DEEPEST = 200, PASSES = 200, PAUSE_MS = 10, LINE_MAX_ = 2 * PATH_MAX };

static const char *const WANTED[] = {"cpuset", "cpu", "cpuacct", "memory", "pids", "freezer"};

struct made {
	int parent; /* the folder in which it was made */
	char name[64];
	dev_t dev; /* device of the parent: identifies the hierarchy for the step's next task */
	ino_t ino;
};

static struct made made[MADE_MAX];
static int made_count;

/* ---- files ------------------------------------------------------------------------------------ */

/* The text of a file in a folder, without its newline; -1 and errno when it cannot be read. */
static int get(int folder, const char *file, char *text, size_t size)
{
	int fd = openat(folder, file, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t length = read(fd, text, size - 1);
	close(fd);
	if (length < 0)
		return -1;
	text[length] = '\0';
	text[strcspn(text, "\n")] = '\0';
	return 0;
}

/* Writes a file of a folder in one call; -1 and errno when it cannot. */
static int put(int folder, const char *file, const char *text)
{
	int fd = openat(folder, file, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t done = write(fd, text, strlen(text));
	int problem = errno;
	close(fd);
	errno = problem;
	return done < 0 ? -1 : 0;
}

/* Whether a word is in a list that is separated by commas. */
static int has(const char *list, const char *word)
{
	size_t length = strlen(word);
	for (const char *at = list; at; at = strchr(at, ',')) {
		at += *at == ',';
		if (!strncmp(at, word, length) && (at[length] == ',' || !at[length]))
			return 1;
	}
	return 0;
}

/* ---- where a task stands ---------------------------------------------------------------------- */

/* The path of a process in the hierarchy of these controllers. */
static int path_of(pid_t pid, const char *controllers, char *path, size_t size)
{
	char name[64], line[LINE_MAX_];
	int found = 0;
	snprintf(name, sizeof name, "/proc/%d/cgroup", (int)pid);
	FILE *file = fopen(name, "re");
	if (!file)
		return 0;
	while (!found && fgets(line, sizeof line, file)) {
		char *names = strchr(line, ':'), *at = names ? strchr(names + 1, ':') : NULL;
		if (!at)
			continue;
		*at++ = '\0';
		at[strcspn(at, "\n")] = '\0';
		found = !strcmp(names + 1, controllers) && strlen(at) < size;
		if (found)
			strcpy(path, at);
	}
	fclose(file);
	return found;
}

/* Opens the folder of a path in the hierarchy that has this controller ("": in that of version 2); -1
 * when no mount of that hierarchy shows the folder. */
static int open_at(const char *controller, const char *path)
{
	char line[LINE_MAX_], root[PATH_MAX], point[PATH_MAX], kind[32], options[512];
	char full[LINE_MAX_];
	int folder = -1;
	FILE *file = fopen("/proc/self/mountinfo", "re");
	if (!file)
		return -1;
	while (folder < 0 && fgets(line, sizeof line, file)) {
		char *rest = strstr(line, " - ");
		if (!rest || strchr(line, '\\') ||
		    sscanf(line, "%*s %*s %*s %4095s %4095s", root, point) != 2 ||
		    sscanf(rest, " - %31s %*s %511s", kind, options) != 2)
			continue;
		size_t skip = strcmp(root, "/") ? strlen(root) : 0;
		if (*controller ? strcmp(kind, "cgroup") || !has(options, controller)
				: strcmp(kind, "cgroup2"))
			continue;
		if (strncmp(path, root, skip) || (path[skip] && path[skip] != '/'))
			continue;
		snprintf(full, sizeof full, "%s%s", point, path + skip);
		folder = open(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	}
	fclose(file);
	return folder;
}

/* Whether we may work in a folder: it is on a cgroup file system and belongs to no other user. */
static int may_act(int folder, struct stat *about, uid_t uid, long magic)
{
	struct statfs kind;
	return !fstat(folder, about) && !fstatfs(folder, &kind) &&
	       (about->st_uid == 0 || about->st_uid == uid) && kind.f_type == magic;
}

/* ---- giving ----------------------------------------------------------------------------------- */

/* A new cpuset has neither cores nor memory nodes: it gets those of the one above. */
static int fill_cpuset(int parent, int child)
{
	static const char *const files[] = {"cpuset.cpus", "cpuset.mems"};
	char text[4096];
	for (int n = 0; n < 2; n++)
		if (get(parent, files[n], text, sizeof text) || put(child, files[n], text))
			return -1;
	return 0;
}

/* Makes the cgroup, or finds the one of an earlier task of this step; returns its descriptor. */
static int make(int parent, const struct stat *about, const char *name)
{
	for (int n = 0; n < made_count; n++)
		if (made[n].dev == about->st_dev && made[n].ino == about->st_ino)
			return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (made_count == MADE_MAX) {
		errno = ENOSPC;
		return -1;
	}
	if (mkdirat(parent, name, 0755))
		return -1;
	struct made *one = &made[made_count];
	one->parent = fcntl(parent, F_DUPFD_CLOEXEC, 3);
	one->dev = about->st_dev;
	one->ino = about->st_ino;
	snprintf(one->name, sizeof one->name, "%s", name);
	if (one->parent < 0) {
		unlinkat(parent, name, AT_REMOVEDIR);
		return -1;
	}
	made_count++;
	return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static int give(int child, pid_t task, uid_t uid, gid_t gid)
{
	char number[32];
	snprintf(number, sizeof number, "%d", (int)task);
	return put(child, "cgroup.procs", number) || fchmod(child, 0755) ||
	       fchownat(child, "cgroup.procs", uid, gid, AT_SYMLINK_NOFOLLOW) ||
	       fchownat(child, "tasks", uid, gid, AT_SYMLINK_NOFOLLOW) ||
	       fchown(child, uid, gid) ? -1 : 0;
}

/* Whether processes in cgroups beneath count for this cgroup too. If not, a process that is moved
 * beneath would escape Slurm's limit. */
static int counts_all(int parent, const char *controllers)
{
	char text[16];
	return !has(controllers, "memory") ||
	       (!get(parent, "memory.use_hierarchy", text, sizeof text) && !strcmp(text, "1"));
}

static int delegate_one(const char *controllers, const char *controller, const char *path,
			pid_t task, uid_t uid, gid_t gid, const char *name, say_f *say)
{
	struct stat about;
	int parent = open_at(controller, path), child = -1, done = 0;
	if (parent < 0)
		return 0; /* not mounted here: no cgroup can be made */
	if (!may_act(parent, &about, uid, CGROUP_SUPER_MAGIC) || !counts_all(parent, controllers)) {
		say("tangram: %s: %s is not such that it could be handed over", controllers, path);
	} else if ((child = make(parent, &about, name)) < 0 ||
		   (has(controllers, "cpuset") && fill_cpuset(parent, child)) ||
		   give(child, task, uid, gid)) {
		say("tangram: %s: no cgroup beneath %s for the step's user: %s", controllers, path,
		    strerror(errno));
	} else {
		done = 1;
	}
	if (child >= 0)
		close(child);
	close(parent);
	return done;
}

/* Makes the user owner of the files that are needed to move processes from the task's cgroup into the
 * one beside it and further, and to enable controllers there. All of them are within `parent`, in
 * which there are only the step's tasks. */
static int give2(int parent, int child, uid_t uid, gid_t gid)
{
	static const char *const files[] = {"cgroup.procs", "cgroup.threads",
					    "cgroup.subtree_control"};
	/* version 2: Slurm does not see processes that were moved, so all must be found at the end */
	if (put(child, "cgroup.max.depth", "32"))
		return -1;
	for (int n = 0; n < 3; n++)
		if (fchownat(child, files[n], uid, gid, AT_SYMLINK_NOFOLLOW))
			return -1;
	return fchmod(child, 0755) || fchown(child, uid, gid) ||
	       fchownat(parent, "cgroup.procs", uid, gid, AT_SYMLINK_NOFOLLOW) ? -1 : 0;
}

/* Version 2: a cgroup beside the task's, if Slurm has a cgroup for the tasks alone and has enabled a
 * controller in it. */
static int delegate_beside(char *path, uid_t uid, gid_t gid, const char *name, say_f *say)
{
	char own[PATH_MAX], lent[512];
	struct stat about;
	char *last = strrchr(path, '/');
	if (!last || last == path || !path_of(getpid(), "", own, sizeof own))
		return 0;
	*last = '\0';
	size_t length = strlen(path);
	if (!strncmp(own, path, length) && (own[length] == '/' || !own[length]))
		return 0; /* the user could move slurmstepd */
	int parent = open_at("", path), child = -1, done = 0;
	if (parent < 0)
		return 0;
	if (get(parent, "cgroup.subtree_control", lent, sizeof lent) || !*lent) {
		/* a hybrid machine: version 1 has the controllers */
	} else if (!may_act(parent, &about, 0, CGROUP2_SUPER_MAGIC) ||
		   (child = make(parent, &about, name)) < 0 || give2(parent, child, uid, gid)) {
		say("tangram: no cgroup beneath %s for the step's user: %s", path, strerror(errno));
	} else {
		done = 1;
	}
	if (child >= 0)
		close(child);
	close(parent);
	return done;
}

int delegate(pid_t task, uid_t uid, gid_t gid, const char *name, say_f *say)
{
	char line[LINE_MAX_], file_name[64], own[PATH_MAX];
	int done = 0;
	snprintf(file_name, sizeof file_name, "/proc/%d/cgroup", (int)task);
	FILE *file = fopen(file_name, "re");
	if (!file)
		return 0;
	while (fgets(line, sizeof line, file)) {
		char *controllers = strchr(line, ':');
		char *path = controllers ? strchr(controllers + 1, ':') : NULL;
		const char *controller = NULL;
		if (!path)
			continue;
		controllers++;
		*path++ = '\0';
		path[strcspn(path, "\n")] = '\0';
		if (strstr(path, "/..") || strlen(path) >= PATH_MAX)
			continue;
		if (!*controllers) {
			done += delegate_beside(path, uid, gid, name, say);
			continue;
		}
		for (size_t n = 0; n < sizeof WANTED / sizeof *WANTED && !controller; n++)
			if (has(controllers, WANTED[n]))
				controller = WANTED[n];
		if (!controller)
			continue;
		/* Slurm finds the step's processes by this cgroup */
		if (has(controllers, "freezer") &&
		    (!path_of(getpid(), controllers, own, sizeof own) || strcmp(own, path)))
			continue;
		done += delegate_one(controllers, controller, path, task, uid, gid, name, say);
	}
	fclose(file);
	return done;
}

/* ---- the end ---------------------------------------------------------------------------------- */

/* One pass: thaws frozen processes, kills all processes, removes empty cgroups, the deepest first.
 * The descriptor is closed. */
static void clear(int folder, int depth)
{
	put(folder, "freezer.state", "THAWED"); /* version 1 */
	put(folder, "cgroup.freeze", "0");	/* version 2 */
	put(folder, "cgroup.kill", "1");	/* since Linux 5.14: kills all beneath, too */
	DIR *list = fdopendir(folder);
	if (!list) {
		close(folder);
		return;
	}
	for (struct dirent *one; depth < DEEPEST && (one = readdir(list));) {
		if (one->d_type != DT_DIR || one->d_name[0] == '.')
			continue;
		int inner = openat(folder, one->d_name,
				   O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (inner >= 0)
			clear(inner, depth + 1);
		unlinkat(folder, one->d_name, AT_REMOVEDIR);
	}
	int fd = openat(folder, "cgroup.procs", O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	FILE *pids = fd < 0 ? NULL : fdopen(fd, "r");
	if (pids) {
		for (int pid; fscanf(pids, "%d", &pid) == 1;)
			if (pid > 1 && pid != getpid())
				kill(pid, SIGKILL);
		fclose(pids);
	} else if (fd >= 0) {
		close(fd);
	}
	closedir(list);
}

static int gone(const struct made *one)
{
	int folder = openat(one->parent, one->name,
			    O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (folder >= 0)
		clear(folder, 0);
	return !unlinkat(one->parent, one->name, AT_REMOVEDIR) || errno == ENOENT ||
	       errno == ENODEV;
}

void undelegate(say_f *say)
{
	const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
	for (int pass = 0; made_count && pass < PASSES; pass++) {
		if (pass)
			nanosleep(&pause, NULL);
		for (int n = made_count - 1; n >= 0; n--) {
			if (!gone(&made[n]))
				continue;
			close(made[n].parent);
			made[n] = made[--made_count];
		}
	}
	for (int n = 0; n < made_count; n++) {
		say("tangram: a cgroup %s cannot be removed; the epilog tries again", made[n].name);
		close(made[n].parent);
	}
	made_count = 0;
}
