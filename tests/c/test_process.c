/* Telling this process from others, living ones from dead ones. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dw_process.h"
#include "dw_test.h"

#define START_TIME_ONE ((dw_process_id)1 << 22)
#define PID_MASK       (START_TIME_ONE - 1)

TEST(this_process_lives_under_its_own_id_alone)
{
    dw_process_id self = dw_process_self();
    CHECK_EQ(self & PID_MASK, getpid());
    CHECK(self >> 22 != 0);
    CHECK_EQ(self, dw_process_self());
    CHECK(!dw_process_is_dead(self));
    /* The number had another owner, at another time. */
    CHECK(dw_process_is_dead(self + START_TIME_ONE));
    CHECK(dw_process_is_dead(self - START_TIME_ONE));
    /* Where no start time was to be had, the number must do. */
    CHECK(!dw_process_is_dead(self & PID_MASK));
}

TEST(a_name_like_a_line_of_stat_does_not_mislead)
{
    dw_process_id self = dw_process_self();
    CHECK_EQ(prctl(PR_SET_NAME, "a) Z 1 1 (b"), 0);
    CHECK_EQ(dw_process_self(), self);
    CHECK(!dw_process_is_dead(self));
}

TEST(a_process_is_dead_from_its_end_on_whether_waited_for_or_not)
{
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        dw_process_id self = dw_process_self();
        if (write(ends[1], &self, sizeof self) != sizeof self)
            _exit(1);
        pause(); /* until it is killed */
        _exit(0);
    }
    dw_process_id id;
    CHECK_EQ(read(ends[0], &id, sizeof id), sizeof id);
    CHECK_EQ(id & PID_MASK, child);
    CHECK(!dw_process_is_dead(id));
    CHECK_EQ(kill(child, SIGKILL), 0);
    WAIT_UNTIL(dw_process_is_dead(id));
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK(dw_process_is_dead(id));
    close(ends[0]);
    close(ends[1]);
}

#ifndef __SANITIZE_THREAD__ /* no threads in a forked child; see test_fork.c */

static int told[2]; /* pipes of the test below, in parent and child */
static int asked[2];

static bool is_zombie(pid_t pid)
{
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *stat = fopen(path, "re");
    CHECK(stat);
    CHECK_EQ(fscanf(stat, "%*d %*s %c", &state), 1);
    fclose(stat);
    return state == 'Z';
}

static void *outlive_main(void *unused)
{
    (void)unused;
    dw_process_id self = dw_process_self();
    char byte;
    if (write(told[1], &self, sizeof self) != sizeof self ||
        read(asked[0], &byte, 1) != 1)
        _exit(1);
    _exit(0);
}

TEST(a_process_whose_first_thread_has_ended_lives_on)
{
    CHECK_EQ(pipe(told), 0);
    CHECK_EQ(pipe(asked), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, outlive_main, NULL))
            _exit(1);
        pthread_exit(NULL);
    }
    dw_process_id id;
    CHECK_EQ(read(told[0], &id, sizeof id), sizeof id);
    /* Until its first thread shows as a zombie. */
    WAIT_UNTIL(is_zombie(child));
    CHECK(!dw_process_is_dead(id));
    CHECK_EQ(write(asked[1], "x", 1), 1);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    for (int i = 0; i < 2; i++) {
        close(told[i]);
        close(asked[i]);
    }
}

#endif
