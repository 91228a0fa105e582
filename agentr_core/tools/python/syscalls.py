"""The system calls that code may make, with their numbers on x86-64 and on 64-bit Arm.

All others are refused. Besides the dangerous ones, these are left out on purpose: removing,
renaming and linking files (a listing of the working folder must show all it holds), reserving space
in them (`fallocate` fills a disk instantly), memory that no limit counts (`memfd_create`, System
V), and changing the mode, owner or times of a file, which Landlock does not control.
"""

from __future__ import annotations

from functools import cache

_NUMBERS = """
read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69,
pwritev 296 70, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, fsync 74 82, fdatasync 75 83, ftruncate 77 46, fadvise64 221 223, pipe 22 -,
pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,

mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
mincore 27 232, membarrier 324 283,

futex 202 98, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, set_tid_address 218 96,
gettid 186 178, exit 60 93, exit_group 231 94, restart_syscall 219 128, sched_yield 24 124,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, arch_prctl 158 -, wait4 61 260,
waitid 247 95,

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -,
getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,

clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, times 100 153,

getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid 121 155, getsid 124 156,
getgroups 115 158, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, getcpu 309 168,
getrandom 318 278,

clone 56 220, clone3 435 435, kill 62 129, tgkill 234 131, prlimit64 302 261, prctl 157 167,
ioctl 16 29, fcntl 72 25, open 2 -, openat 257 56
"""
"""Name, number on x86-64, number on 64-bit Arm, which lacks the old calls."""


@cache
def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the calls that code may make, some under conditions.

    `machine` is the name in `os.uname`. Raises `OSError` for a machine whose numbers are not known.
    """
    if machine not in ("x86_64", "aarch64"):
        raise OSError(f"the numbers of system calls on {machine} are not known to the Python tool")
    column = 1 if machine == "x86_64" else 2
    rows = [row.split() for row in _NUMBERS.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
