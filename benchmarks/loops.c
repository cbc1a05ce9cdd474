/* Three loops, timed by themselves: nanoseconds per turn of arithmetic, of a call without a path, of open and close. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int argc, char **argv) {
    long turns = argc > 1 ? atol(argv[1]) : 1000;
    volatile unsigned long x = 1;
    double t = now();
    for (long i = 0; i < turns * 100; i++) x = x * 6364136223846793005UL + 1442695040888963407UL;
    double arithmetic = (now() - t) / (turns * 100);
    t = now();
    for (long i = 0; i < turns; i++) syscall(SYS_getppid);
    double call = (now() - t) / turns;
    t = now();
    for (long i = 0; i < turns / 4; i++) {
        int fd = open("/usr/lib/os-release", O_RDONLY);
        if (fd < 0) return 1;
        close(fd);
    }
    double opened = (now() - t) / (turns / 4);
    printf("%.4f %.4f %.4f\n", arithmetic, call, opened);
    return 0;
}
