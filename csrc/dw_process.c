#include "dw_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* The kernel's PID_MAX_LIMIT is 2^22; 42 bits of ticks last 1,400 years. */
#define PID_BITS 22

typedef struct {
    char state;
    long num_threads;
    uint64_t start_time; /* clock ticks since boot */
} process_stat;

/* Source: proc_pid_stat(5), fields 3, 20 and 22. */
static bool read_stat(pid_t pid, process_stat *out)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    char text[1024];
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    /* The name, field 2, may itself hold spaces and parentheses. */
    const char *rest = strrchr(text, ')');
    unsigned long long start_time;
    if (!rest ||
        sscanf(rest + 1,
               " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s"
               " %*s %*s %ld %*s %llu",
               &out->state, &out->num_threads, &start_time) != 3)
        return false;
    out->start_time = start_time;
    return true;
}

dw_process_id dw_process_self(void)
{
    pid_t pid = getpid();
    process_stat stat;
    uint64_t start_time = read_stat(pid, &stat) ? stat.start_time : 0;
    return start_time << PID_BITS | (uint64_t)pid;
}

bool dw_process_is_dead(dw_process_id process)
{
    pid_t pid = (pid_t)(process & ((1U << PID_BITS) - 1));
    if (kill(pid, 0) && errno == ESRCH)
        return true;
    process_stat stat;
    if (!read_stat(pid, &stat))
        return false;
    /* A process whose first thread has ended shows as a zombie too, with more
     * than that one thread left. */
    bool is_zombie = stat.state == 'Z' && stat.num_threads <= 1;
    uint64_t start_time = process >> PID_BITS;
    return is_zombie || (start_time && start_time != stat.start_time);
}
