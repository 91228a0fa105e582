/* A clock that is wrong by as many seconds as the file CLOCK_OFFSET holds, as a native 64-bit integer. It is mapped, so
 * that the clock jumps when the file is overwritten. Loaded by LD_PRELOAD; what sleeps and waits does so by the kernel.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;
static int (*kernel_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void)
{
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC);
    offset = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (offset == MAP_FAILED)
        abort();
    kernel_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = kernel_gettime(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += *offset;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    int status = clock_gettime(CLOCK_REALTIME, &precise);
    (void)zone;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return status;
}

time_t time(time_t *copy)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (copy)
        *copy = precise.tv_sec;
    return precise.tv_sec;
}
