/* Any sequence of calls on the core, read from bytes: clients come and leave,
 * requests arm and disarm, fd numbers are reused behind the core's back, names
 * are stale or never existed. After each call what it answered must be what
 * dw_watch.h and dw_flags.h allow, and at the end nothing may be left.
 *
 * Built for libFuzzer, or with fuzz_main.c; `make -C tests/c fuzz`.
 */
#include <sys/socket.h>
#include <unistd.h>

#include "dw_check.h"
#include "dw_clock.h"
#include "dw_net.h"
#include "dw_watch.h"

#define NUM_PLACES    6
#define NUM_WATCHES   24
#define NUM_MAILBOXES 2
#define MAX_SENT      16

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} input;

/* A connection, or a place for one. */
typedef struct {
    net_pair net;
    dw_conn_id conn;      /* 0: a free place */
    dw_conn_id last_conn; /* of the one before it here; stale */
    int fd;               /* as attached; the server's end may be closed */
    unsigned num_sent;
    bool has_shut; /* our own sending side */
    bool is_dirty; /* the peer has left, or is said to have */
} place;

typedef struct {
    dw_watch_id id; /* 0: free */
    place *place;
    dw_flag flag;
    dw_reason_mask mask;
    int mailbox; /* -1 none, or closed since */
    uint32_t serial;
    bool has_flag; /* our reference is still there */
    bool is_aborted;
    bool is_delivered;
} watch;

typedef struct {
    input in;
    enum dw_driver driver;
    dw_flags *flags;
    dw_watcher *watcher;
    dw_mailbox *mailboxes[NUM_MAILBOXES];
    place places[NUM_PLACES];
    watch watches[NUM_WATCHES];
    uint64_t num_connections;
    uint32_t serial;
    bool is_closed;
} fuzz;

static uint8_t take(input *in)
{
    return in->at == in->end ? 0 : *in->at++;
}

static place *take_place(fuzz *f)
{
    return &f->places[take(&f->in) % NUM_PLACES];
}

static watch *take_watch(fuzz *f)
{
    return &f->watches[take(&f->in) % NUM_WATCHES];
}

/* What a call on a name that is good answers once the watcher is closed. */
static bool is_refused(const fuzz *f, int rc)
{
    if (f->is_closed)
        CHECK_EQ(rc, DW_ECLOSED);
    return f->is_closed;
}

static uint64_t cookie_of(const fuzz *f, const watch *w)
{
    return (uint64_t)w->serial << 32 | (uint64_t)(w - f->watches);
}

/* The watch is over, and what its flag says of it is final. */
static void forget_watch(fuzz *f, watch *w)
{
    if (w->has_flag) {
        int reason = dw_flag_reason(f->flags, w->flag);
        CHECK(reason == 0 || w->is_aborted || DW_MASK(reason) & w->mask);
        CHECK(reason == 0 || w->is_aborted || w->place->is_dirty);
        dw_flag_release(f->flags, w->flag);
        CHECK_EQ(dw_flag_reason(f->flags, w->flag), DW_ESTALE);
    }
    *w = (watch){.mailbox = -1};
}

static void forget_watches_of(fuzz *f, const place *p)
{
    for (int i = 0; i < NUM_WATCHES; i++) {
        if (f->watches[i].id && f->watches[i].place == p)
            forget_watch(f, &f->watches[i]);
    }
}

/* The owner's close is a reset, so that no port waits for a minute. */
static void close_server(place *p)
{
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    if (p->net.server >= 0)
        setsockopt(p->net.server, SOL_SOCKET, SO_LINGER, &at_once,
                   sizeof at_once);
    net_close_end(&p->net.server);
}

static void detach(fuzz *f, place *p)
{
    if (!p->conn)
        return;
    int rc = dw_watcher_detach(f->watcher, p->conn);
    if (!is_refused(f, rc))
        CHECK_EQ(rc, 0);
    rc = dw_watcher_detach(f->watcher, p->conn);
    CHECK_EQ(rc, f->is_closed ? DW_ECLOSED : DW_ESTALE);
    forget_watches_of(f, p);
    close_server(p);
    net_close(&p->net);
    f->num_connections--;
    *p = (place){.net = {-1, -1}, .last_conn = p->conn};
}

static void attach(fuzz *f, place *p)
{
    p->fd = p->net.server;
    int rc = dw_watcher_attach(f->watcher, p->fd, &p->conn);
    if (is_refused(f, rc)) {
        close_server(p);
        net_close(&p->net);
        p->conn = 0;
        return;
    }
    CHECK_EQ(rc, 0);
    CHECK(p->conn != p->last_conn);
    f->num_connections++;
    CHECK_EQ(dw_watcher_attach(f->watcher, p->fd, &(dw_conn_id){0}), DW_EEXIST);
}

static void detach_one(fuzz *f)
{
    detach(f, take_place(f));
}

static void connect_one(fuzz *f)
{
    place *p = take_place(f);
    uint8_t kind = take(&f->in);
    detach(f, p);
    /* Over TCP it costs ten times as much. */
    p->net = net_open(kind >= 224 ? NET_TCP : NET_UNIX);
    attach(f, p);
}

/* The owner closed the socket and said nothing, and accept() gave its number
 * to another. */
static void reuse_number(fuzz *f)
{
    place *old = take_place(f);
    place *p = take_place(f);
    if (!old->conn || p == old || old->net.server < 0)
        return;
    detach(f, p);
    int number = old->net.server;
    p->net = net_open(NET_UNIX);
    CHECK_EQ(dup2(p->net.server, number), number);
    net_close_end(&p->net.server);
    p->net.server = number;
    old->net.server = -1;
    old->is_dirty = true;
    attach(f, p);
}

static void close_behind(fuzz *f)
{
    place *p = take_place(f);
    close_server(p);
    p->is_dirty = true;
}

static void arm(fuzz *f)
{
    place *p = take_place(f);
    watch *w = take_watch(f);
    uint8_t how = take(&f->in);
    if (!p->conn || w->id)
        return;
    watch armed = {.place = p, .mailbox = -1, .serial = ++f->serial};
    armed.mask = how & 1 ? DW_MASK_GONE : DW_MASK_ANY;
    if (how & 2)
        armed.mailbox = how >> 7;
    CHECK_EQ(dw_flag_alloc(f->flags, &armed.flag), 0);
    armed.has_flag = true;
    *w = armed;
    int rc =
        dw_watcher_arm(f->watcher, p->conn, armed.flag, armed.mask,
                       armed.mailbox < 0 ? NULL : f->mailboxes[armed.mailbox],
                       cookie_of(f, w), &w->id);
    if (is_refused(f, rc)) {
        CHECK_EQ(w->id, 0);
        forget_watch(f, w);
        return;
    }
    CHECK(rc == 0 || rc == 1);
    CHECK(w->id != 0);
    if (rc == 1)
        CHECK(dw_flag_reason(f->flags, armed.flag) > 0);
    for (int i = 0; i < NUM_WATCHES; i++) {
        const watch *other = &f->watches[i];
        CHECK(other == w || other->place != p || other->id != w->id);
    }
}

static void disarm(fuzz *f)
{
    watch *w = take_watch(f);
    if (!w->id)
        return;
    dw_conn_id conn = w->place->conn;
    int rc = dw_watcher_disarm(f->watcher, conn, w->id);
    if (is_refused(f, rc))
        return;
    CHECK(rc == 0 || rc == 1);
    if (w->has_flag && (rc || !w->is_aborted))
        CHECK_EQ(dw_flag_reason(f->flags, w->flag) > 0, rc);
    if (w->is_delivered)
        CHECK_EQ(rc, 1);
    CHECK_EQ(dw_watcher_disarm(f->watcher, conn, w->id), DW_ESTALE);
    forget_watch(f, w);
}

static void leave(fuzz *f)
{
    place *p = take_place(f);
    enum net_leave how = take(&f->in) % 4;
    if (p->net.client < 0)
        return;
    p->is_dirty = true;
    if (how == LEAVE_HALF_CLOSE) {
        shutdown(p->net.client, SHUT_WR);
    } else if (p->net.server < 0 || p->has_shut) {
        net_close_end(&p->net.client);
    } else {
        net_leave(&p->net, how);
    }
}

static void move_bytes(fuzz *f)
{
    place *p = take_place(f);
    uint8_t how = take(&f->in);
    char bytes[4096] = {0};
    if (how & 1 && p->net.server >= 0) {
        net_try_receive(p->net.server);
    } else if (p->net.client >= 0 && p->num_sent++ < MAX_SENT) {
        send(p->net.client, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static void shut_own_side(fuzz *f)
{
    place *p = take_place(f);
    int how = take(&f->in) % 3; /* SHUT_RD, SHUT_WR, SHUT_RDWR */
    if (p->net.server < 0)
        return;
    shutdown(p->net.server, how);
    p->has_shut = true;
    /* On AF_UNIX the own SHUT_RD is the peer's SHUT_WR to the kernel. */
    p->is_dirty = true;
}

static void lose(fuzz *f)
{
    place *p = take_place(f);
    enum dw_reason reason = take(&f->in) % 16;
    if (!p->conn)
        return;
    bool is_reason = reason && DW_MASK(reason) & DW_MASK_ANY;
    int rc = dw_watcher_lost(f->watcher, p->conn, reason);
    if (!is_reason) {
        CHECK_EQ(rc, DW_EINVAL);
        return;
    }
    p->is_dirty = true;
    if (is_refused(f, rc))
        return;
    CHECK(rc == 0 || rc == 1);
    CHECK_EQ(dw_watcher_lost(f->watcher, p->conn, reason), 0);
    dw_conn_info info;
    CHECK_EQ(dw_watcher_info(f->watcher, p->conn, &info), 0);
    CHECK_EQ(info.fd, p->fd);
    CHECK(info.seen & DW_MASK(reason));
    CHECK(info.seen & DW_MASK(info.reason));
    if (rc)
        CHECK_EQ(info.reason, reason);
}

static void turn(fuzz *f)
{
    int rc = dw_watcher_poll(f->watcher, 0);
    if (f->driver == DW_DRIVER_THREAD)
        CHECK_EQ(rc, DW_ENOTSUP);
    else if (!is_refused(f, rc))
        CHECK(rc >= 0);
}

static void deliver(fuzz *f, int mailbox, const dw_event *event)
{
    uint32_t i = (uint32_t)event->cookie;
    CHECK(i < NUM_WATCHES);
    watch *w = &f->watches[i];
    CHECK_EQ(w->serial, event->cookie >> 32);
    CHECK_EQ(w->mailbox, mailbox);
    CHECK_EQ(w->id, event->watch);
    CHECK(w->place->conn == event->conn);
    CHECK(w->mask & DW_MASK(event->reason));
    CHECK(event->at_ns <= dw_clock_ns());
    CHECK(!w->is_delivered);
    w->is_delivered = true;
    if (w->has_flag && !w->is_aborted)
        CHECK_EQ(dw_flag_reason(f->flags, w->flag), event->reason);
}

static void drain(fuzz *f)
{
    uint8_t how = take(&f->in);
    int mailbox = how % NUM_MAILBOXES;
    dw_event events[8];
    if (!f->mailboxes[mailbox])
        return;
    int rc = dw_mailbox_drain(f->mailboxes[mailbox], events, 1 + how / 32);
    if (is_refused(f, rc))
        return;
    CHECK(rc >= 0 && rc <= 1 + how / 32);
    for (int i = 0; i < rc; i++)
        deliver(f, mailbox, &events[i]);
}

static void renew_mailbox(fuzz *f)
{
    int mailbox = take(&f->in) % NUM_MAILBOXES;
    if (f->mailboxes[mailbox])
        dw_mailbox_close(f->mailboxes[mailbox]);
    for (int i = 0; i < NUM_WATCHES; i++) {
        if (f->watches[i].mailbox == mailbox)
            f->watches[i].mailbox = -1;
    }
    int rc = dw_mailbox_create(f->watcher, &f->mailboxes[mailbox]);
    if (!is_refused(f, rc))
        CHECK_EQ(rc, 0);
}

static void abort_flag(fuzz *f)
{
    watch *w = take_watch(f);
    if (!w->has_flag)
        return;
    int rc = dw_flag_cancel(f->flags, w->flag, DW_REASON_ABORTED, 1);
    CHECK(rc == 0 || rc == 1);
    if (rc)
        w->is_aborted = true;
    CHECK(dw_flag_reason(f->flags, w->flag) > 0);
    CHECK_EQ(dw_flag_ack(f->flags, w->flag, 7), 0);
}

static bool is_stale(fuzz *f, dw_flag flag)
{
    int rc = dw_flag_retain(f->flags, flag);
    if (rc == 0)
        dw_flag_release(f->flags, flag);
    else
        CHECK_EQ(rc, DW_ESTALE);
    return rc != 0;
}

/* The request gave its flag back before it disarmed: a cancel by the watch is
 * then stale, and must not hit the slot's next tenant. A cancel that is at work
 * at this moment holds a reference until it is done. */
static void release_early(fuzz *f)
{
    watch *w = take_watch(f);
    if (!w->has_flag)
        return;
    w->has_flag = false;
    dw_flag_release(f->flags, w->flag);
    WAIT_UNTIL(is_stale(f, w->flag));
    CHECK_EQ(dw_flag_cancel(f->flags, w->flag, DW_REASON_ABORTED, 1),
             DW_ESTALE);
    dw_flag_release(f->flags, w->flag);
}

/* Names that were good once, or never were. */
static void use_stale_names(fuzz *f)
{
    const place *p = take_place(f);
    dw_conn_id conn = p->last_conn;
    uint8_t how = take(&f->in);
    if (how & 1)
        conn = (uint64_t)take(&f->in) << 32 | (uint64_t)take(&f->in)
                                                  << (how >> 3);
    for (int i = 0; i < NUM_PLACES; i++) {
        if (conn == f->places[i].conn)
            return;
    }
    int want = f->is_closed ? DW_ECLOSED : DW_ESTALE;
    dw_watch_id id;
    dw_conn_info info;
    CHECK_EQ(dw_watcher_arm(f->watcher, conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            NULL, 0, &id),
             want);
    CHECK_EQ(dw_watcher_disarm(f->watcher, conn, take(&f->in)), want);
    CHECK_EQ(dw_watcher_lost(f->watcher, conn, DW_REASON_FIN), want);
    CHECK_EQ(dw_watcher_info(f->watcher, conn, &info), want);
    CHECK_EQ(dw_watcher_set_vanish(f->watcher, conn, 2000), want);
    CHECK_EQ(dw_watcher_reblind(f->watcher, conn), want);
    CHECK_EQ(dw_watcher_detach(f->watcher, conn), want);
}

static void opt_in(fuzz *f)
{
    const place *p = take_place(f);
    uint8_t how = take(&f->in);
    if (!p->conn)
        return;
    int rc = 0;
    switch (how % 4) {
    case 0:
        rc = dw_watcher_set_vanish(f->watcher, p->conn,
                                   how & 4 ? 2000U + how : 0);
        break;
    case 1:
        rc = dw_watcher_set_probing(f->watcher, p->conn, how & 4);
        break;
    case 2:
        rc = dw_watcher_unblind(f->watcher, p->conn, 1024 * (how + 1));
        break;
    default:
        rc = dw_watcher_reblind(f->watcher, p->conn);
    }
    if (!is_refused(f, rc))
        CHECK(rc >= 0 || (rc == DW_EBADF && p->is_dirty));
}

static void check_stats(fuzz *f)
{
    dw_watcher_stats stats;
    dw_watcher_read_stats(f->watcher, &stats);
    if (f->is_closed) {
        CHECK_EQ(stats.num_connections, 0);
        CHECK_EQ(stats.num_armed, 0);
        return;
    }
    CHECK_EQ(stats.num_connections, f->num_connections);
    uint64_t most = 0, least = 0, num_signals = 0;
    for (int i = 0; i < NUM_WATCHES; i++) {
        const watch *w = &f->watches[i];
        if (!w->id || w->is_delivered)
            continue;
        bool is_open = w->has_flag && !w->is_aborted;
        /* The thread may fire it between the two looks. */
        least += !w->place->is_dirty;
        most += !is_open || f->driver == DW_DRIVER_THREAD ||
                dw_flag_reason(f->flags, w->flag) == 0;
    }
    CHECK(least <= stats.num_armed && stats.num_armed <= most);
    for (int i = 0; i <= DW_REASON_MAX; i++)
        num_signals += stats.num_signals[i];
    CHECK(num_signals >= stats.num_second_sources);
}

static void close_early(fuzz *f)
{
    /* Rarely: what follows is all the same. */
    if (take(&f->in) < 240)
        return;
    dw_watcher_close(f->watcher);
    f->is_closed = true;
}

static void (*const operations[])(fuzz *f) = {
    connect_one,   arm,        arm,           disarm,        leave,
    detach_one,    lose,       turn,          drain,         reuse_number,
    close_behind,  abort_flag, release_early, renew_mailbox, move_bytes,
    shut_own_side, opt_in,     check_stats,   close_early,   use_stale_names,
};

static void finish(fuzz *f)
{
    for (int i = 0; i < NUM_PLACES; i++)
        detach(f, &f->places[i]);
    check_stats(f);
    for (int i = 0; i < NUM_MAILBOXES; i++) {
        dw_event event;
        if (!f->mailboxes[i])
            continue;
        int rc = dw_mailbox_drain(f->mailboxes[i], &event, 1);
        CHECK_EQ(rc, f->is_closed ? DW_ECLOSED : 0);
    }
    dw_flags_stats stats;
    dw_flags_read_stats(f->flags, &stats);
    CHECK_EQ(stats.num_live, 0);
    /* In either order: an open mailbox keeps the watcher. */
    if (f->serial & 1)
        dw_watcher_free(f->watcher);
    for (int i = 0; i < NUM_MAILBOXES; i++) {
        if (f->mailboxes[i])
            dw_mailbox_close(f->mailboxes[i]);
    }
    if (!(f->serial & 1))
        dw_watcher_free(f->watcher);
    dw_flags_free(f->flags);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct {
        const char *poller;
        enum dw_driver driver;
    } setups[] = {
        {"epoll", DW_DRIVER_LOOP},
        {"epoll", DW_DRIVER_THREAD},
        {"poll", DW_DRIVER_THREAD},
    };
    fuzz f = {.in = {data, data + size}};
    size_t setup = take(&f.in) % 3;
    f.driver = setups[setup].driver;
    for (int i = 0; i < NUM_PLACES; i++)
        f.places[i].net = (net_pair){-1, -1};
    for (int i = 0; i < NUM_WATCHES; i++)
        f.watches[i].mailbox = -1;
    CHECK_EQ(dw_flags_create(&f.flags), 0);
    CHECK_EQ(
        dw_watcher_create(f.flags, setups[setup].poller, f.driver, &f.watcher),
        0);
    for (int i = 0; i < NUM_MAILBOXES; i++)
        CHECK_EQ(dw_mailbox_create(f.watcher, &f.mailboxes[i]), 0);
    while (f.in.at != f.in.end) {
        size_t num = sizeof operations / sizeof operations[0];
        operations[take(&f.in) % num](&f);
    }
    finish(&f);
    return 0;
}
