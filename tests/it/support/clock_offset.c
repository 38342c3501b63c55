/* Preloaded into redis-server: adds the microseconds in the file $CLOCK_OFFSET_FILE, in text, to the wall clock. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int file = -1;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    if (path) file = open(path, O_RDONLY | O_CLOEXEC);
}

static long long now_us(void) {
    struct timespec now;
    char text[24] = "";
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    if (file >= 0 && pread(file, text, sizeof text - 1, 0) < 0) abort();
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000 + atoll(text);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    long long us = now_us();
    (void)zone;
    now->tv_sec = us / 1000000;
    now->tv_usec = us % 1000000;
    return 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (clock != CLOCK_REALTIME) return syscall(SYS_clock_gettime, clock, now);
    long long us = now_us();
    now->tv_sec = us / 1000000;
    now->tv_nsec = us % 1000000 * 1000;
    return 0;
}

time_t time(time_t *result) {
    time_t now = now_us() / 1000000;
    if (result) *result = now;
    return now;
}
