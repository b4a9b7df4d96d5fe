/* The fast path: serves plain commands of a sandbox's init without entering Python. It reads the
 * order, starts the command, waits for it and reports its end.
 *
 * It knows only what Python has told it. An order is plain when everything but its lease and its
 * argv equals, byte for byte, an order that Python has served before. Anything else goes back to
 * Python as bytes that nobody has acted on. A command goes to Python while it runs, if it takes long
 * or if Python has something to do for it (`wait_longer`). Nothing of one command is kept for the
 * next. Where an action has no session and left files, Python removes them before the next order is
 * read.
 *
 * It has no feature and leaves out no check that Python's way (`init.py`, `command.py`) does not.
 * Where it was not built, Python serves everything.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FAST_PATH_VERSION 10    /* raise it when the struct or its meaning changes */
#define BYTES (1 << 16)     /* of a read; Python serves an order that does not fit */
#define OUTPUT (1 << 14)    /* bytes of one stream, at most */
#define ARGS 256
#define KNOWN 16
#define OWN 8
#define FOLDERS 3
#define KEEPS 3
#define SOON_NS 2000000   /* a command that takes longer is waited for with more care */
#define LOOK_NS 4000000   /* then its memory is looked at; each further pause doubles */
#define SHOWN_NS 40000000 /* Python reads the output of a command that takes longer */
#define TAG_RUN 2
#define TAG_EXEC 2
#define TAG_RETURN 10
#define TAG_ENDED 20
#define CPU_AT_LEAST 1      /* bit of an outcome's field `at_least`: the CPU time is a lower bound */
#define RSS_AT_LEAST 2      /* the same for maxrss */
#define PAGE_KIB 4          /* no program has less */

/* Bytes that Python owns and keeps for as long as this process lives. */
struct bytes {
    const uint8_t *at;
    uint64_t size;
};

/* An order that Python has served: what follows the payload in it, and what it meant. */
struct known {
    struct bytes tail;
    char *const *envp;
    int32_t shared;    /* the kernel kills it before us when memory runs out */
    int32_t processes; /* its limit of processes at once; 0: none of its own */
    int32_t once;      /* it has no session: nothing that it leaves may stay */
};

struct fast_path {
    int32_t control, wake, cpus, score, devnull;
    int32_t used;     /* the file of its cgroup's CPU time; -1: there is none */
    int32_t gone;     /* readable when the pause process has ended; -1: there is none */
    int32_t outer;    /* our child that is, or started, the pause process */
    int32_t helper;   /* our child that serves the sandbox's network; 0: there is none */
    int32_t own[OWN]; /* its processes in the sandbox's /proc; 0: no more */
    int32_t changed_count, known_count;
    int32_t order_head, call_head; /* the first byte of an order and of a call: how many fields */
    const int32_t *changed; /* signals that a command gets back as default */
    int64_t patience_ns; /* Python takes over a command that takes longer */
    int64_t output_max;  /* or writes more to a stream; at most OUTPUT */
    /* of a call that has only argv or shell, for each part of a long output that may be kept: what
     * is served here is kept whole */
    struct bytes call_tails[KEEPS];
    struct bytes completed, failed; /* an outcome's bytes up to its exit code */
    /* the outcome's fields after maxrss; the last five bytes are the set of `at_least` bits,
     * `setup_ns` and `resize_ns`, which the worker fills in, and two that are 0 for a command */
    struct bytes outcome_tail;
    struct bytes begin; /* the directory of commands; empty: ours */
    /* what a command without a session may leave files in, the sandbox's home first; empty: none */
    struct bytes folders[FOLDERS];
    struct known known[KNOWN];
    /* results for Python */
    int32_t pid, out, err, status, ended, fell;
    int32_t size; /* of data: an order, or bytes not acted on; 0: the worker is gone */
    int64_t started_ns, cpu_ns, maxrss_kib;
    int64_t hidden; /* its memory is unknown: the kernel's figure includes ours, which is more */
    int64_t group_ns; /* `group_ns` after SOON_NS; -1: it did not run for so long, or nothing counts */
    int64_t missed; /* processes of it may have ended unseen and uncounted */
    uint8_t data[BYTES];
};

enum { LOOK = 0, READ = 1, RUNNING = 2, GONE = 3, FELL = 4, FRESHEN = 5 }; /* what `fast_path_serve` returns */

/* ---- reading ---- */

struct reader {
    const uint8_t *at, *end;
};

static int take(struct reader *in, uint64_t count, uint64_t *value)
{
    if ((uint64_t)(in->end - in->at) < count)
        return 0;
    for (*value = 0; count; count--)
        *value = *value << 8 | *in->at++;
    return 1;
}

static int byte_is(struct reader *in, uint8_t wanted)
{
    return in->at < in->end && *in->at++ == wanted;
}

static int rest_is(const struct reader *in, const struct bytes *wanted)
{
    return (uint64_t)(in->end - in->at) == wanted->size
           && memcmp(in->at, wanted->at, (size_t)wanted->size) == 0;
}

static int whole(struct reader *in, uint64_t *value)
{
    uint64_t head;
    if (!take(in, 1, &head))
        return 0;
    if (head < 0x80) {
        *value = head;
        return 1;
    }
    return head >= 0xcc && head <= 0xcf && take(in, 1u << (head - 0xcc), value);
}

/* The size of a string: short, or after one of the heads from `first` on (str 8 or bin 8). */
static int sized(struct reader *in, uint8_t first, int may_be_short, struct reader *inside)
{
    uint64_t head, size;
    if (!take(in, 1, &head))
        return 0;
    if (may_be_short && (head & 0xe0) == 0xa0)
        size = head & 0x1f;
    else if (head < first || head > first + 2u || !take(in, 1u << (head - first), &size))
        return 0;
    if ((uint64_t)(in->end - in->at) < size)
        return 0;
    inside->at = in->at;
    inside->end = in->at += size;
    return 1;
}

static int list(struct reader *in, uint64_t *count)
{
    uint64_t head;
    if (!take(in, 1, &head))
        return 0;
    if ((head & 0xf0) == 0x90) {
        *count = head & 0x0f;
        return 1;
    }
    return head == 0xdc && take(in, 2, count);
}

/* The program to start: argv, as strings that end with a zero, in `room`. */
struct program {
    char *argv[ARGS + 3];
    char room[BYTES + ARGS];
};

static int argument(struct program *program, uint64_t index, char **at, struct reader text)
{
    uint64_t size = (uint64_t)(text.end - text.at);
    for (uint64_t i = 0; i < size; i++) {
        if (text.at[i] == 0 || text.at[i] >= 0x80)
            return 0; /* an argument cannot hold it, or Python must see whether it is UTF-8 */
        (*at)[i] = (char)text.at[i];
    }
    (*at)[size] = 0;
    program->argv[index] = *at;
    *at += size + 1;
    return 1;
}

/* Whether this call has only shell, or only an argv whose first word is a path. */
static int read_call(const struct fast_path *path, struct reader in, struct program *program)
{
    struct reader text;
    uint64_t count, i;
    char *at = program->room;
    if (!byte_is(&in, (uint8_t)path->call_head) || !byte_is(&in, TAG_EXEC) || !list(&in, &count) || count > ARGS)
        return 0;
    for (i = 0; i < count; i++)
        if (!sized(&in, 0xd9, 1, &text) || !argument(program, i, &at, text))
            return 0;
    program->argv[count] = NULL;
    if (!sized(&in, 0xd9, 1, &text))
        return 0;
    for (i = 0; i < KEEPS && !rest_is(&in, &path->call_tails[i]); i++)
        ;
    if (i == KEEPS)
        return 0;
    if (text.at == text.end)
        return count > 0 && strchr(program->argv[0], '/') != NULL;
    if (count > 0)
        return 0;
    program->argv[0] = (char *)"/bin/sh";
    program->argv[1] = (char *)"-c";
    program->argv[3] = NULL;
    return argument(program, 2, &at, text);
}

/* Reads one order. Returns what it is like if it is plain and the bytes hold nothing else; NULL
 * otherwise. */
static const struct known *read_order(const struct fast_path *path, const uint8_t *data,
                                      uint64_t size, uint64_t *lease, struct program *program)
{
    struct reader in = {data + 4, data + size}, call;
    uint64_t said = 0;
    int i;
    for (i = 4; size >= 4 && i-- > 0;)
        said = said << 8 | data[i];
    if (size < 4 || said != size - 4)
        return NULL;
    if (!byte_is(&in, (uint8_t)path->order_head) || !byte_is(&in, TAG_RUN) || !whole(&in, lease)
        || !sized(&in, 0xc4, 0, &call))
        return NULL;
    for (i = 0; i < path->known_count; i++)
        if (rest_is(&in, &path->known[i].tail))
            return read_call(path, call, program) ? &path->known[i] : NULL;
    return NULL;
}

/* ---- writing ---- */

static uint8_t *put(uint8_t *to, const void *from, uint64_t size)
{
    memcpy(to, from, (size_t)size);
    return to + size;
}

static uint8_t *put_whole(uint8_t *to, uint8_t head, int bytes, uint64_t value)
{
    *to++ = head;
    while (bytes--)
        *to++ = (uint8_t)(value >> 8 * bytes);
    return to;
}

/* The head of a byte string, as short as Python writes it, so that frames have the same size. */
static uint8_t *put_size(uint8_t *to, uint64_t size)
{
    return size < 256 ? put_whole(to, 0xc4, 1, size) : put_whole(to, 0xc5, 2, size);
}

static uint64_t packed(uint64_t size)
{
    return (size < 256 ? 2 : 3) + size;
}

/* Reports the end of a command, and whether nothing is left of it; returns 0 when the worker is
 * gone. */
static int tell(const struct fast_path *path, uint64_t lease, const uint8_t *output,
                const uint64_t sizes[2], int64_t exec_ns, int none_left)
{
    static uint8_t frame[2 * OUTPUT + 1024];
    const struct bytes *head = path->status ? &path->failed : &path->completed;
    uint8_t *to = frame + 4, *sent = frame;
    uint64_t size;
    *to++ = 0x95;
    *to++ = TAG_ENDED;
    to = put_whole(to, 0xcf, 8, lease);
    to = put(to, head->at, head->size);
    to = put_whole(to, 0xcc, 1, (uint64_t)WEXITSTATUS(path->status));
    *to++ = 0; /* no signal */
    to = put_whole(to, 0xcf, 8, (uint64_t)exec_ns);
    to = put_whole(to, 0xcf, 8, (uint64_t)path->cpu_ns);
    to = put_whole(to, 0xcf, 8, (uint64_t)path->maxrss_kib);
    to = put(to, path->outcome_tail.at, path->outcome_tail.size);
    to[-5] = (uint8_t)((path->hidden ? RSS_AT_LEAST : 0) | (path->missed ? CPU_AT_LEAST : 0));
    to = put_size(to, 2 + packed(sizes[0]) + packed(sizes[1]) + 3);
    *to++ = 0x94;
    *to++ = TAG_RETURN;
    to = put(put_size(to, sizes[0]), output, sizes[0]);
    to = put(put_size(to, sizes[1]), output + sizes[0], sizes[1]);
    to = put(to, none_left ? "\x92\0\0\xc3" : "\x92\0\0\xc2", 4); /* nothing was cut */
    size = (uint64_t)(to - frame) - 4;
    for (int i = 0; i < 4; i++)
        frame[i] = (uint8_t)(size >> 8 * i);
    while (sent < to) {
        ssize_t n = send(path->control, sent, (size_t)(to - sent), MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return 0;
        sent += n > 0 ? n : 0;
    }
    return 1;
}

/* ---- one command ---- */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void say_score(const struct fast_path *path, const struct known *known, const char *text)
{
    if (known->shared && pwrite(path->score, text, strlen(text), 0) < 0)
        return; /* the score stays as it was */
}

/* Becomes the program. Until then it runs in our memory, so it only makes system calls and keeps
 * nothing. */
static void become(const struct fast_path *path, const struct known *known,
                   const struct program *program, int out, int err)
{
    const struct sigaction usual = {.sa_handler = SIG_DFL};
    const struct rlimit limit = {(rlim_t)known->processes, (rlim_t)known->processes};
    static const sigset_t none;
    for (int i = 0; i < path->changed_count; i++)
        sigaction(path->changed[i], &usual, NULL);
    if (setsid() < 0 || dup2(path->devnull, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
        return;
    if (known->processes)
        setrlimit(RLIMIT_NPROC, &limit); /* refused: the site's limit is lower, and stays */
    if (path->begin.size && chdir((const char *)path->begin.at) < 0)
        return; /* Python says why */
    sigprocmask(SIG_SETMASK, &none, NULL); /* none of our handlers can run any more */
    execve(program->argv[0], program->argv, known->envp);
}

/* Does what posix_spawn does, which asks for each of 64 signals and maps a stack: that would be a
 * fifth of the cost of a command. */
static int spawn(struct fast_path *path, const struct known *known, const struct program *program,
                 int out, int err)
{
    static volatile int failed; /* set by the child, in the same memory */
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    failed = 0;
    say_score(path, known, "500");
    const pid_t pid = vfork();
    if (pid == 0) {
        become(path, known, program, out, err);
        failed = 1;
        _exit(127);
    }
    say_score(path, known, "0");
    if (pid > 0 && failed)
        waitpid(pid, NULL, 0);
    sigprocmask(SIG_SETMASK, &before, NULL);
    path->pid = pid;
    return pid > 0 && !failed;
}

/* Starts the program with pipes for its output. If that fails, Python tries again and reports. */
static int start(struct fast_path *path, const struct known *known, struct program *program)
{
    int out[2], err[2], started;
    struct timespec times[2];
    if (pipe2(out, O_CLOEXEC) < 0)
        return 0;
    if (pipe2(err, O_CLOEXEC) < 0) {
        close(out[0]);
        close(out[1]);
        return 0;
    }
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[1] = times[0];
    futimens(path->cpus, times); /* its CPUs hold from now on, see units_file.py */
    path->started_ns = now_ns();
    path->status = path->ended = 0;
    path->cpu_ns = path->maxrss_kib = path->hidden = path->missed = 0;
    path->group_ns = -1;
    started = spawn(path, known, program, out[1], err[1]);
    close(out[1]);
    close(err[1]);
    if (!started) {
        close(out[0]);
        close(err[0]);
        return 0;
    }
    path->out = out[0];
    path->err = err[0];
    return 1;
}

/* Whether each entry of an open directory is as expected; no for a descriptor of -1. */
static int all_are(const struct fast_path *path, int folder,
                   int (*expected)(const struct fast_path *, const char *))
{
    static _Alignas(uint64_t) char entries[BYTES / 8];
    const uint64_t length = 2 * sizeof(uint64_t), name = length + sizeof(uint16_t) + 1;
    int all = folder >= 0;
    long got = -1;
    while (all && (got = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0)
        for (long at = 0; at < got && all;) { /* see struct linux_dirent64 */
            uint16_t size;
            memcpy(&size, entries + at + length, sizeof size);
            all = expected(path, entries + at + name);
            at += size;
        }
    return all && got == 0;
}

/* Whether an entry of /proc is the pause process, a child of it, or no process. */
static int is_own(const struct fast_path *path, const char *name)
{
    int i, pid = atoi(name);
    for (i = 0; i < OWN && path->own[i] != pid; i++)
        ;
    return pid == 0 || i < OWN;
}

/* Whether an entry stands for the directory itself or the one above, as in an empty directory. */
static int is_dot(const struct fast_path *path, const char *name)
{
    (void)path;
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Whether the sandbox's /proc shows only the pause process and its children. */
static int alone_inside(const struct fast_path *path)
{
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int alone = all_are(path, proc, is_own);
    if (proc >= 0)
        close(proc);
    return alone;
}

/* Makes the sandbox's home our directory again; returns whether nothing was left in its folders. */
static int is_fresh(const struct fast_path *path)
{
    int fresh = 1;
    for (int i = 0; fresh && i < FOLDERS && path->folders[i].size; i++) {
        int folder = open((const char *)path->folders[i].at,
                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        fresh = all_are(path, folder, is_dot) && (i > 0 || fchdir(folder) == 0);
        if (folder >= 0)
            close(folder);
    }
    return fresh;
}

/* Whether a command's peak memory says nothing: until it began its program it shared our memory, so
 * a peak not above ours is ours. Ours only grows, so a lookup is needed only for a larger peak. */
static int hides(long maxrss_kib)
{
    static long ours_kib;
    struct rusage own;
    if (maxrss_kib > ours_kib && getrusage(RUSAGE_SELF, &own) == 0)
        ours_kib = own.ru_maxrss;
    return maxrss_kib <= ours_kib;
}

static int64_t cpu_ns(const struct rusage *used)
{
    return (used->ru_utime.tv_sec + used->ru_stime.tv_sec) * INT64_C(1000000000)
           + (used->ru_utime.tv_usec + used->ru_stime.tv_usec) * INT64_C(1000);
}

/* Waits for all processes that have ended; returns whether none is left. */
static int reap(struct fast_path *path)
{
    struct rusage used;
    int status;
    for (;;) {
        pid_t pid = wait4(-1, &status, WNOHANG, &used);
        if (pid < 0)
            return errno == ECHILD && path->gone < 0;
        if (pid == 0)
            return path->gone >= 0 && path->ended && alone_inside(path);
        if (pid == path->outer || pid == path->helper)
            path->fell = 1;
        path->cpu_ns += cpu_ns(&used);
        if (pid == path->pid && hides(used.ru_maxrss)) {
            path->hidden = 1;
            used.ru_maxrss = PAGE_KIB;
        }
        if (used.ru_maxrss > path->maxrss_kib)
            path->maxrss_kib = used.ru_maxrss;
        if (pid == path->pid) {
            path->status = status;
            path->ended = 1;
        }
    }
}

/* Waits a short time until the command has ended and none of its processes is left. Returns 1 then,
 * 0 if Python takes the command over, and -1 if it takes longer.
 * Only SIGCHLD, which is blocked, is waited for: to wait for anything else as well would cost more
 * system calls. So another order or the end of the pause process is noticed `SOON_NS` later. */
static int wait_soon(struct fast_path *path)
{
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    for (;;) {
        int64_t left = path->started_ns + SOON_NS - now_ns();
        struct timespec wait = {0, left > 0 ? (long)left : 0};
        if (sigtimedwait(&child, NULL, &wait) < 0)
            return errno == EAGAIN ? -1 : 0; /* it takes longer, or another signal came */
        if (reap(path))
            return path->ended && !path->fell;
        if (path->ended || path->fell)
            return 0; /* it left processes */
        if (left <= 0)
            return -1; /* however often we wake */
    }
}

/* The most memory in KiB that a process has had; 0 when it is gone. */
static long high_water_kib(const char *pid)
{
    char name[32], text[4096];
    const char *line;
    ssize_t got = 0;
    int file;
    snprintf(name, sizeof name, "/proc/%.16s/status", pid);
    file = open(name, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        got = read(file, text, sizeof text - 1);
        close(file);
    }
    text[got > 0 ? got : 0] = 0;
    line = strstr(text, "\nVmHWM:");
    return line ? strtol(line + 7, NULL, 10) : 0;
}

static long most_kib; /* of the processes at which `looked_at` looked */

static int looked_at(const struct fast_path *path, const char *name)
{
    if (!is_own(path, name)) {
        long kib = high_water_kib(name);
        most_kib = kib > most_kib ? kib : most_kib;
    }
    return 1;
}

/* Notes the memory of the command's processes, as the kernel's own figure may be hidden (`hides`). */
static void look(struct fast_path *path)
{
    char pid[16];
    most_kib = 0;
    if (path->gone >= 0) {
        int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        all_are(path, proc, looked_at);
        if (proc >= 0)
            close(proc);
    } else {
        snprintf(pid, sizeof pid, "%d", (int)path->pid);
        most_kib = high_water_kib(pid);
    }
    if (most_kib > path->maxrss_kib)
        path->maxrss_kib = most_kib;
}

/* Whether a pipe of the command holds output. */
static int has_output(const struct fast_path *path, int *too_much)
{
    int fds[2] = {path->out, path->err}, held, some = 0;
    for (int i = 0; i < 2; i++) {
        if (ioctl(fds[i], FIONREAD, &held) < 0)
            held = 0;
        some |= held > 0;
        *too_much |= held > path->output_max;
    }
    return some;
}

/* A descriptor that is readable when a child has ended, for as long as SIGCHLD is blocked. */
static int ends_of_children(void)
{
    static int ends = -1;
    sigset_t child;
    if (ends < 0) {
        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        ends = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    }
    return ends;
}

/* Waits on for a command until Python has something to do: it has run for `patience_ns`, or has
 * written more than C can report or for longer than its readers shall wait; another order or signal
 * came, or the pause process ended. Returns as `wait_for`. While output lies in the pipes, they are
 * looked at every `SOON_NS`, so that no command waits longer for a place in a full one. */
static int wait_longer(struct fast_path *path)
{
    struct pollfd fds[6] = {
        {ends_of_children(), POLLIN, 0}, {path->wake, POLLIN, 0}, {path->control, POLLIN, 0},
        {path->gone, POLLIN, 0}, {path->out, POLLIN, 0}, {path->err, POLLIN, 0}};
    struct signalfd_siginfo said;
    int64_t look_at = LOOK_NS, pause = LOOK_NS, listen_at = 0;
    int too_much = 0;
    while (fds[0].fd >= 0) {
        int64_t ran = now_ns() - path->started_ns, until = path->patience_ns;
        struct timespec wait = {0, 0};
        if (ran >= until)
            return 0;
        if (ran >= look_at) {
            look(path);
            look_at = ran + (pause *= 2);
        }
        until = look_at < until ? look_at : until;
        until = ran < listen_at && listen_at < until ? listen_at : until;
        if (until > ran) {
            wait.tv_sec = (until - ran) / 1000000000;
            wait.tv_nsec = (until - ran) % 1000000000;
        }
        if (ppoll(fds, ran < listen_at ? 4 : 6, &wait, NULL) < 0
            || fds[1].revents || fds[2].revents || fds[3].revents)
            return 0;
        if (fds[0].revents && read(fds[0].fd, &said, sizeof said) > 0) {
            if (reap(path))
                return path->ended && !path->fell;
            if (path->ended || path->fell)
                return 0; /* it left processes */
        }
        if (ran >= listen_at && (fds[4].revents || fds[5].revents)) {
            if ((has_output(path, &too_much) && ran >= SHOWN_NS) || too_much)
                return 0;
            listen_at = ran + SOON_NS;
        }
    }
    return 0;
}

/* The CPU time in ns of our cgroup without our own; -1 when nothing counts it. Python's is
 * `GroupCpu.ns`. */
static int64_t group_ns(const struct fast_path *path)
{
    char text[512];
    const char *at = text;
    struct rusage own;
    int64_t unit = 1, ns;
    ssize_t got = path->used < 0 ? -1 : pread(path->used, text, sizeof text - 1, 0);
    if (got <= 0 || getrusage(RUSAGE_SELF, &own) < 0)
        return -1;
    text[got] = 0;
    if (*at < '0' || *at > '9') {
        at = strstr(text, "usage_usec ");
        if (at == NULL)
            return -1;
        at += strlen("usage_usec ");
        unit = 1000;
    }
    ns = strtoll(at, NULL, 10) * unit - cpu_ns(&own);
    return ns > 0 ? ns : 0;
}

/* In a pid namespace, processes whose parent ended before them end unseen. The cgroup has counted
 * them since `SOON_NS`; without it, the CPU time is a lower bound. */
static void count_unseen(struct fast_path *path)
{
    int64_t now = path->group_ns < 0 ? -1 : group_ns(path);
    if (path->gone < 0)
        return;
    path->missed = now < 0;
    if (now >= 0 && now - path->group_ns > path->cpu_ns)
        path->cpu_ns = now - path->group_ns;
}

/* Waits until the command has ended and none of its processes is left; 0: Python takes it over. */
static int wait_for(struct fast_path *path)
{
    int over = wait_soon(path);
    if (over >= 0)
        return over;
    path->group_ns = group_ns(path);
    over = wait_longer(path);
    if (over)
        count_unseen(path);
    return over;
}

/* Never waits: a command can shrink its pipe, or hand it to another process that reads as well. */
static uint64_t contents(int fd, uint8_t *to, uint64_t size)
{
    uint64_t done = 0;
    ssize_t got;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (done < size && (got = read(fd, to + done, (size_t)(size - done))) > 0)
        done += (uint64_t)got;
    return done;
}

/* Reads the pipes. All output is in them, as no process is left that could write. */
static int drain(const struct fast_path *path, uint8_t *output, uint64_t sizes[2])
{
    int fds[2] = {path->out, path->err}, held[2];
    for (int i = 0; i < 2; i++)
        if (ioctl(fds[i], FIONREAD, &held[i]) < 0 || held[i] < 0 || held[i] > path->output_max)
            return 0;
    for (int i = 0; i < 2; i++) {
        sizes[i] = held[i] ? contents(fds[i], output, (uint64_t)held[i]) : 0;
        output += sizes[i];
    }
    return 1;
}

static int serve(struct fast_path *path)
{
    static struct program program;
    static uint8_t output[2 * OUTPUT];
    struct pollfd fds[4] = {
        {path->wake, POLLIN, 0}, {path->control, POLLIN, 0}, {path->gone, POLLIN, 0},
        {path->helper ? ends_of_children() : -1, POLLIN, 0}};
    path->fell = 0;
    for (;;) {
        const struct known *known;
        uint64_t lease, sizes[2];
        int64_t took;
        ssize_t got;
        int fresh;
        if (poll(fds, 4, -1) < 0 || fds[0].revents || fds[2].revents || fds[3].revents)
            return LOOK;
        if (!fds[1].revents)
            continue;
        got = recv(path->control, path->data, BYTES, 0);
        if (got < 0)
            return LOOK;
        path->size = (int32_t)got;
        known = read_order(path, path->data, (uint64_t)got, &lease, &program);
        if (known == NULL || !start(path, known, &program))
            return READ;
        if (!wait_for(path) || WIFSIGNALED(path->status)
            || !drain(path, output, sizes))
            return path->fell ? FELL : RUNNING;
        close(path->out);
        close(path->err);
        took = now_ns() - path->started_ns;
        fresh = !known->once || is_fresh(path);
        if (!tell(path, lease, output, sizes, took, fresh))
            return GONE;
        if (!fresh)
            return FRESHEN;
    }
}

/* Serves plain orders until something else happens.
 *
 * Returns LOOK: Python must look at its descriptors; READ: `data` has been read and not acted on;
 * RUNNING: `data` is an order whose command runs, or has ended with `status` if `ended`; GONE: the
 * worker is gone; FELL: the pause process has ended; FRESHEN: `data` is the order of a command without
 * a session, whose end was reported, and which left something in the sandbox's folders. */
int fast_path_serve(struct fast_path *path)
{
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &before);
    ends_of_children(); /* now, so that no later command adds a descriptor */
    int back = serve(path);
    sigprocmask(SIG_SETMASK, &before, NULL); /* later signals reach Python's handler now */
    return back;
}

/* With the size below, tells Python whether this library was built from the code it expects. */
int fast_path_version(void)
{
    return FAST_PATH_VERSION;
}

unsigned fast_path_size(void)
{
    return sizeof(struct fast_path);
}
