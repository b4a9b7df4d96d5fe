/* The option `--tangram[=JOBID|auto|off]` of srun, sbatch and salloc: finds the broker of a step's
 * user, and decides when the user gets cgroups.
 *
 * Invariants: a job is not touched unless it asked, or the site asked for all by `default=auto`, and
 * no error here makes a job fail. Files of the user are read on the node, with the user's rights only:
 * the step gets the path of the access file, never the key in it. The only code that runs as root is
 * in `cgroup.c`.
 *
 * Arguments in plugstack.conf: `default=auto` (every step is treated as if it had asked; a step can
 * opt out with `--tangram=off`), `cgroups=off`.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include "cgroup.h"

SPANK_PLUGIN(tangram, 1)

#define MAX_FILE 65536
#define MAX_JOB 64

enum mode { OFF, AUTO, JOB };
enum state { MISSING, NOT_YOURS, ENDED, LIVE };

static enum mode mode = OFF;
static char job[MAX_JOB + 1];
static int asked;	/* whether the user asked by the option, and not the site by default=auto */
static int cgroups = 1;
static int given;	/* number of hierarchies in which a cgroup was made */
static int living;	/* tasks that live on this node */

/* ---- brokers ---------------------------------------------------------------------------------- */

/* Whether a word can be the name of a job's folder. */
static int is_job(const char *word)
{
	size_t length = strlen(word);
	if (!length || length > MAX_JOB || *word == '.')
		return 0;
	for (; *word; word++)
		if (!isalnum((unsigned char)*word) && !strchr("._-", *word))
			return 0;
	return 1;
}

/* Reads what an access file says of its broker, and when it was written. The key is not kept. */
static enum state look(int folder, const char *path, time_t *when)
{
	struct stat about;
	enum state state = NOT_YOURS;
	int fd = openat(folder, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? MISSING : NOT_YOURS;
	char *text = NULL;
	if (!fstat(fd, &about) && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
	    !(about.st_mode & 077) && about.st_size < MAX_FILE &&
	    (text = calloc(1, MAX_FILE)) && read(fd, text, MAX_FILE - 1) > 0) {
		const char *at = strstr(text, "\"ended\"");
		if (at) {
			at += strlen("\"ended\"");
			at += strspn(at, ": \t\r\n");
			state = strncmp(at, "\"\"", 2) ? ENDED : LIVE;
			if (when)
				*when = about.st_mtime;
		}
	}
	free(text);
	close(fd);
	return state;
}

static void account_home(char *path, size_t size)
{
	char text[4096];
	struct passwd entry, *found = NULL;
	if (!getpwuid_r(geteuid(), &entry, text, sizeof text, &found) && found)
		snprintf(path, size, "%s", found->pw_dir);
}

/* The folder of all jobs, from the step's environment; without a step, from this process's own. */
static int jobs_folder(spank_t sp, char *path, size_t size)
{
	char home[PATH_MAX - 16] = "";
	const char *below = "";
	const char *const names[] = {"TANGRAM_HOME", "HOME"};
	for (int n = 0; n < 2 && !*home; n++) {
		below = n ? "/.tangram" : "";
		if (!sp)
			snprintf(home, sizeof home, "%s", getenv(names[n]) ? getenv(names[n]) : "");
		else if (spank_getenv(sp, names[n], home, sizeof home) != ESPANK_SUCCESS)
			*home = '\0';
	}
	if (!*home) /* --export=NONE */
		account_home(home, sizeof home);
	int length = snprintf(path, size, "%s%s/jobs", home, below);
	return *home == '/' && length > 0 && (size_t)length < size;
}

static enum state look_for(const char *jobs, const char *name, char *path, size_t size)
{
	int length = snprintf(path, size, "%s/%s/access.json", jobs, name);
	return length > 0 && (size_t)length < size ? look(AT_FDCWD, path, NULL) : MISSING;
}

/* The job of the broker that was started last and whose access file does not say that it has ended. */
static int newest(const char *jobs, char *name)
{
	time_t best = 0, when = 0;
	int found = 0;
	DIR *list = opendir(jobs);
	if (!list)
		return 0;
	for (struct dirent *one; (one = readdir(list));) {
		char path[MAX_JOB + 16], here[MAX_JOB + 1];
		if (!is_job(one->d_name))
			continue;
		memcpy(here, one->d_name, strlen(one->d_name) + 1);
		snprintf(path, sizeof path, "%s/access.json", here);
		if (look(dirfd(list), path, &when) != LIVE || (found && when <= best))
			continue;
		best = when;
		found = 1;
		memcpy(name, here, sizeof here);
	}
	closedir(list);
	return found;
}

/* ---- the step's environment, with the user's rights ------------------------------------------- */

static void hand_on(spank_t sp, const char *name, const char *path)
{
	if (spank_setenv(sp, "TANGRAM_JOB", name, 1) != ESPANK_SUCCESS ||
	    spank_setenv(sp, "TANGRAM_ACCESS", path, 1) != ESPANK_SUCCESS)
		slurm_error("tangram: cannot set TANGRAM_JOB and TANGRAM_ACCESS");
}

/* Prints only on the step's first node, and only if the user asked. */
static int may_speak(spank_t sp)
{
	uint32_t node = 1;
	return asked && spank_get_item(sp, S_JOB_NODEID, &node) == ESPANK_SUCCESS && node == 0;
}

static void connect_auto(spank_t sp, const char *jobs)
{
	char path[PATH_MAX], name[MAX_JOB + 1];
	const char *const named[] = {"TANGRAM_JOB", "SLURM_JOB_ID"};
	if (spank_getenv(sp, "TANGRAM_ACCESS", path, sizeof path) == ESPANK_SUCCESS && *path)
		return; /* the caller has named the broker */
	for (int n = 0; n < 2; n++) {
		if (spank_getenv(sp, named[n], name, sizeof name) != ESPANK_SUCCESS || !is_job(name))
			continue;
		if (look_for(jobs, name, path, sizeof path) == LIVE) {
			hand_on(sp, name, path);
			return;
		}
		if (n == 0)
			return; /* the caller has named the job; its broker may still be starting */
	}
	if (newest(jobs, name) && look_for(jobs, name, path, sizeof path) == LIVE)
		hand_on(sp, name, path);
	else if (may_speak(sp))
		slurm_spank_log("tangram: no broker of yours is running (none below %s); the step "
				"runs without one", jobs);
}

/* Says in one line for the user what is wrong with a job's access file. */
static const char *wrong(enum state state)
{
	return state == MISSING ? "there is none; `tangram info -j JOBID` and squeue say what runs"
	       : state == ENDED ? "its broker has ended; name a job that runs, or leave JOBID out"
				: "it is not a file that only you can read; see `tangram info`";
}

static void connect_job(spank_t sp, const char *jobs)
{
	char path[PATH_MAX];
	enum state state = look_for(jobs, job, path, sizeof path);
	if (state != LIVE && may_speak(sp))
		slurm_spank_log("tangram: --tangram=%s: access file %s: %s", job, path, wrong(state));
	hand_on(sp, job, path); /* so that the step does not use another broker instead */
}

/* ---- the option ------------------------------------------------------------------------------- */

/* srun refuses a job without a broker; sbatch and salloc do not, as the broker may run when they start.
 */
static int refused_here(void)
{
	char jobs[PATH_MAX], path[PATH_MAX];
	if (spank_context() != S_CTX_LOCAL || !jobs_folder(NULL, jobs, sizeof jobs))
		return 0;
	enum state state = look_for(jobs, job, path, sizeof path);
	if (state != LIVE)
		slurm_spank_log("tangram: --tangram=%s: access file %s: %s", job, path, wrong(state));
	return state != LIVE;
}

static int told(int value, const char *word, int remote)
{
	(void)value;
	asked = 1;
	if (!word || !*word || !strcmp(word, "auto") || !strcmp(word, "(null)")) {
		mode = AUTO;
	} else if (!strcmp(word, "off")) {
		mode = OFF;
	} else if (is_job(word)) {
		mode = JOB;
		snprintf(job, sizeof job, "%s", word);
		return !remote && refused_here() ? -1 : 0;
	} else {
		mode = OFF;
		if (!remote)
			slurm_spank_log("tangram: --tangram=%s: not a job id; give one, auto or off",
					word);
		return remote ? 0 : -1;
	}
	return 0;
}

static struct spank_option option = {
	.name = "tangram",
	.arginfo = "[JOBID|auto|off]",
	.usage = "connect to your tangram broker, and give the step cgroups of its own",
	.has_arg = 2,
	.val = 0,
	.cb = told,
};

/* ---- what Slurm calls ------------------------------------------------------------------------- */

int slurm_spank_init(spank_t sp, int count, char **words)
{
	spank_context_t context = spank_context();
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE)
		if (spank_option_register(sp, &option) != ESPANK_SUCCESS)
			slurm_error("tangram: cannot register the option --tangram");
	for (int n = 0; n < count; n++) {
		if (!strcmp(words[n], "default=auto"))
			mode = AUTO;
		else if (!strcmp(words[n], "cgroups=off"))
			cgroups = 0;
		else if (strcmp(words[n], "default=off") && strcmp(words[n], "cgroups=on"))
			slurm_error("tangram: plugstack.conf: %s is none of default=auto, "
				    "default=off, cgroups=on, cgroups=off", words[n]);
	}
	return 0;
}

/* Called with the user's effective rights, once per node. */
int slurm_spank_user_init(spank_t sp, int count, char **words)
{
	char jobs[PATH_MAX];
	uint32_t step = 0;
	uid_t uid;
	(void)count, (void)words;
	if (mode == OFF || spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    geteuid() != uid || !jobs_folder(sp, jobs, sizeof jobs))
		return 0;
	spank_get_item(sp, S_JOB_STEPID, &step);
	if (mode == JOB)
		connect_job(sp, jobs);
	else if (step != SLURM_BATCH_SCRIPT && step != SLURM_INTERACTIVE_STEP)
		connect_auto(sp, jobs); /* a script may start a broker; its steps find that one */
	return 0;
}

/* Called as root, in slurmstepd, when Slurm has put the task into its own cgroups and the task waits
 * to be started. (After `task_init_privileged`, which runs in the task itself, Slurm would still move
 * the task.) */
int slurm_spank_task_post_fork(spank_t sp, int count, char **words)
{
	uid_t uid;
	gid_t gid;
	pid_t task;
	uint32_t number, step;
	char name[64];
	(void)count, (void)words;
	if (mode == OFF || !cgroups)
		return 0;
	if (spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_GID, &gid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_TASK_PID, &task) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_ID, &number) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
		return 0;
	if (uid == 0 || geteuid() != 0 || step == SLURM_EXTERN_CONT)
		return 0;
	if (step == SLURM_BATCH_SCRIPT)
		snprintf(name, sizeof name, "tangram-job%u-batch-%d", number, (int)getpid());
	else
		snprintf(name, sizeof name, "tangram-job%u-step%u-%d", number, step, (int)getpid());
	living++;
	given += delegate(task, uid, gid, name, slurm_info);
	if (!given && living == 1 && may_speak(sp))
		slurm_spank_log("tangram: this node has no cgroups to give to the step: cores are "
				"lent by affinity only (the reason is in slurmd's log)");
	return 0;
}

/* Called as root. The step is over with its last task; Slurm removes its own cgroups right after. */
int slurm_spank_task_exit(spank_t sp, int count, char **words)
{
	(void)sp, (void)count, (void)words;
	if (given && --living <= 0)
		undelegate(slurm_info);
	return 0;
}

int slurm_spank_exit(spank_t sp, int count, char **words)
{
	(void)sp, (void)count, (void)words;
	if (given)
		undelegate(slurm_info);
	return 0;
}
