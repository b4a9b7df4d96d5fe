"""The numbers of the system calls that a filter names. Pure; `seccomp` says what becomes of them.
"""

from __future__ import annotations

# by name: (x86_64, aarch64); -1: that machine does not have it
NUMBERS: dict[str, tuple[int, int]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "capset": (126, 91),
    "chmod": (90, -1), "chown": (92, -1), "chroot": (161, 51), "clock_adjtime": (305, 266),
    "clock_settime": (227, 112), "clone": (56, 220), "connect": (42, 203),
    "creat": (85, -1), "create_module": (174, -1), "delete_module": (176, 106),
    "fanotify_init": (300, 262), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchown": (93, 55),
    "fchownat": (260, 54), "fcntl": (72, 25), "finit_module": (313, 273),
    "fremovexattr": (199, 16), "fsetxattr": (190, 7), "init_module": (175, 105),
    "inotify_add_watch": (254, 27), "inotify_init": (253, -1), "inotify_init1": (294, 26),
    "ioctl": (16, 29), "ioperm": (173, -1), "iopl": (172, -1), "ioprio_set": (251, 30),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "kill": (62, 129), "lchown": (94, -1), "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15), "lsetxattr": (189, 6), "memfd_create": (319, 279),
    "migrate_pages": (256, 238), "mkdir": (83, -1), "mkdirat": (258, 34),
    "mknod": (133, -1), "mknodat": (259, 33), "mount": (165, 40), "move_pages": (279, 239),
    "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184), "mq_open": (240, 180), "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186),
    "msgrcv": (70, 188), "msgsnd": (69, 189), "nfsservctl": (180, 42),
    "open": (2, -1), "openat": (257, 56),
    "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "pivot_root": (155, 41),
    "prctl": (157, 167), "prlimit64": (302, 261),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142), "removexattr": (197, 14),
    "request_key": (249, 218), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "semctl": (66, 191),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "setdomainname": (171, 162), "setfsgid": (123, 152), "setfsuid": (122, 151),
    "setgid": (106, 144), "setgroups": (116, 159), "setregid": (114, 143),
    "setresgid": (119, 149), "setresuid": (117, 147), "setreuid": (113, 145), "setuid": (105, 146),
    "sethostname": (170, 161), "setns": (308, 268),
    "setpriority": (141, 140), "settimeofday": (164, 170), "setxattr": (188, 5),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198),
    "socketpair": (53, 199), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58),
}

# from 424 on the numbers are the same on every machine
BOTH: dict[str, int] = {
    "clone3": 435, "fchmodat2": 452, "file_setattr": 469,
    "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
    "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "memfd_secret": 447,
    "mount_setattr": 442,
    "move_mount": 429, "open_tree": 428, "open_tree_attr": 467, "openat2": 437, "pidfd_getfd": 438,
    "process_madvise": 440, "quotactl_fd": 443, "removexattrat": 466, "setxattrat": 463,
}

NEWEST = 469  # the last number that was examined for this table (Linux 6.17)
