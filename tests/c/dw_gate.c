#include "dw_gate.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "dw_base.h"
#include "dw_test.h"

#define MAX_GATES 16

typedef struct {
    const char *point;
    bool is_closed;
    int num_stopped;
    int num_passed;
    void (*run)(void *arg);
    void *arg;
} sync_gate;

static sync_gate gates[MAX_GATES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards gates */
static pthread_cond_t changed;

/* Under the mutex. */
static sync_gate *gate_find(const char *point, bool is_made)
{
    for (int i = 0; i < MAX_GATES; i++) {
        if (!gates[i].point && is_made)
            gates[i].point = point;
        if (gates[i].point && !strcmp(gates[i].point, point))
            return &gates[i];
    }
    if (is_made)
        dw_test_fail(__FILE__, __LINE__, "no gate left for %s", point);
    return NULL;
}

/* Under the mutex. */
static void wait_changed(const char *why)
{
    uint64_t deadline_ns = dw_test_deadline_ns();
    struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / 1000000000U),
        .tv_nsec = (long)(deadline_ns % 1000000000U),
    };
    if (pthread_cond_timedwait(&changed, &mutex, &until))
        dw_test_fail(__FILE__, __LINE__, "waited in vain at %s", why);
}

static void reach(const char *point, void *unused)
{
    (void)unused;
    pthread_mutex_lock(&mutex);
    sync_gate *gate = gate_find(point, false);
    void (*run)(void *arg) = NULL;
    void *arg = NULL;
    if (gate) {
        run = gate->run;
        arg = gate->arg;
        gate->run = NULL;
        gate->num_passed++;
        if (gate->is_closed) {
            gate->num_stopped++;
            pthread_cond_broadcast(&changed);
            while (gate->is_closed)
                wait_changed(point);
            gate->num_stopped--;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (run)
        run(arg);
}

void gate_install(void)
{
    memset(gates, 0, sizeof gates);
    pthread_mutex_init(&mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    dw_sync_hook = reach;
}

void gate_close(const char *point)
{
    pthread_mutex_lock(&mutex);
    gate_find(point, true)->is_closed = true;
    pthread_mutex_unlock(&mutex);
}

void gate_wait(const char *point)
{
    pthread_mutex_lock(&mutex);
    while (!gate_find(point, true)->num_stopped)
        wait_changed(point);
    pthread_mutex_unlock(&mutex);
}

void gate_open(const char *point)
{
    pthread_mutex_lock(&mutex);
    gate_find(point, true)->is_closed = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

void gate_run(const char *point, void (*run)(void *arg), void *arg)
{
    pthread_mutex_lock(&mutex);
    sync_gate *gate = gate_find(point, true);
    gate->run = run;
    gate->arg = arg;
    pthread_mutex_unlock(&mutex);
}

int gate_count(const char *point)
{
    pthread_mutex_lock(&mutex);
    int num_passed = gate_find(point, true)->num_passed;
    pthread_mutex_unlock(&mutex);
    return num_passed;
}
