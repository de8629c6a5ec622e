/* Stops a thread at a sync point (DW_SYNC_POINT in dw_base.h) until the test
 * lets it go, or has it do something there.
 *
 *     gate_close("watch:event-locked");    whoever comes there stops
 *     gate_wait("watch:event-locked");     until one has
 *     ...
 *     gate_open("watch:event-locked");     it goes on, and so does who follows
 *
 * A stopped thread holds whatever the core holds at that point; what the test
 * does meanwhile must not need it. Nobody stops for longer than 10 s: then the
 * test fails.
 */
#ifndef DW_GATE_H
#define DW_GATE_H

/* All gates open; once for each process, which the harness sees to. */
void gate_install(void);

void gate_close(const char *point);
void gate_wait(const char *point);
void gate_open(const char *point);

/* The next thread to come to the point calls run(arg) there, once. */
void gate_run(const char *point, void (*run)(void *arg), void *arg);

/* How often threads have come to the point since it was first named to one of
 * these functions. */
int gate_count(const char *point);

#endif
