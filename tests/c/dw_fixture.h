/* A watcher with its flags, over each poller, driver and kind of socket. */
#ifndef DW_FIXTURE_H
#define DW_FIXTURE_H

#include "dw_net.h"
#include "dw_test.h"
#include "dw_watch.h"

typedef struct {
    const char *label;
    const char *poller;
    enum dw_driver driver;
    enum net_kind kind;
} watch_setup;

/* Every poller with every driver that it goes with: over each kind of socket,
 * over TCP where the kind makes no difference, and where the thread itself is
 * what is tested. */
extern const watch_setup all_setups[9];
extern const watch_setup tcp_setups[3];
extern const watch_setup thread_setups[2];

typedef struct {
    const watch_setup *setup;
    dw_flags *flags;
    dw_watcher *watcher;
    dw_mailbox *mailbox;
} fixture;

/* One attached connection with one watch on it. */
typedef struct {
    net_pair net;
    dw_conn_id conn;
    dw_flag flag;
    dw_watch_id watch;
} watched;

void fixture_open(fixture *fx, const watch_setup *setup);
/* Frees all, which a leak check follows. */
void fixture_close(fixture *fx);

/* Opens a pair and attaches its server end. */
void fixture_attach(fixture *fx, watched *out);
/* Arms a new flag on it, with the fixture's mailbox and a cookie. RETURNS: as
 * dw_watcher_arm, of which 0 and 1 alone pass. */
int fixture_arm(fixture *fx, watched *w, dw_reason_mask mask, uint64_t cookie);
/* Both, with any reason and the cookie 0. */
void fixture_watch(fixture *fx, watched *out);
/* Detaches, closes and releases, whatever is still there. */
void fixture_drop(fixture *fx, watched *w);

/* One round of the loop, where the test is the driver. */
void fixture_turn(fixture *fx);
#define UNTIL(fx, predicate) WAIT_UNTIL((fixture_turn(fx), (predicate)))

/* Returns when the watcher has handled all that happened before: it watches a
 * new connection, has that leave and waits for its flag. */
void fixture_settle(fixture *fx);

int fixture_reason(fixture *fx, const watched *w);
dw_conn_info fixture_info(fixture *fx, const watched *w);
dw_watcher_stats fixture_stats(fixture *fx);

/* Takes all that is in the fixture's mailbox, up to 16. RETURNS: how many. */
int fixture_drain(fixture *fx, dw_event events[16]);

#endif
