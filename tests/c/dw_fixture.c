#include "dw_fixture.h"

#define EACH_POLLER(kind_label, kind)                              \
    {"epoll thread " kind_label, "epoll", DW_DRIVER_THREAD, kind}, \
        {"epoll loop " kind_label, "epoll", DW_DRIVER_LOOP, kind}, \
    {                                                              \
        "poll thread " kind_label, "poll", DW_DRIVER_THREAD, kind  \
    }

const watch_setup all_setups[9] = {
    EACH_POLLER("tcp", NET_TCP),
    EACH_POLLER("tcp6", NET_TCP6),
    EACH_POLLER("unix", NET_UNIX),
};

const watch_setup tcp_setups[3] = {
    EACH_POLLER("tcp", NET_TCP),
};

const watch_setup thread_setups[2] = {
    {"epoll thread tcp", "epoll", DW_DRIVER_THREAD, NET_TCP},
    {"poll thread tcp", "poll", DW_DRIVER_THREAD, NET_TCP},
};

void fixture_open(fixture *fx, const watch_setup *setup)
{
    fx->setup = setup;
    CHECK_EQ(dw_flags_create(&fx->flags), 0);
    CHECK_EQ(dw_watcher_create(fx->flags, setup->poller, setup->driver,
                               &fx->watcher),
             0);
    CHECK_EQ(dw_mailbox_create(fx->watcher, &fx->mailbox), 0);
}

void fixture_close(fixture *fx)
{
    dw_flags_stats stats;
    dw_flags_read_stats(fx->flags, &stats);
    CHECK_EQ(stats.num_live, 0);
    CHECK_EQ(fixture_stats(fx).num_connections, 0);
    CHECK_EQ(fixture_stats(fx).num_armed, 0);
    if (fx->mailbox)
        dw_mailbox_close(fx->mailbox);
    dw_watcher_free(fx->watcher);
    dw_flags_free(fx->flags);
}

void fixture_attach(fixture *fx, watched *out)
{
    *out = (watched){.net = net_open(fx->setup->kind)};
    CHECK_EQ(dw_watcher_attach(fx->watcher, out->net.server, &out->conn), 0);
    CHECK(out->conn != 0);
}

int fixture_arm(fixture *fx, watched *w, dw_reason_mask mask, uint64_t cookie)
{
    CHECK_EQ(dw_flag_alloc(fx->flags, &w->flag), 0);
    int rc = dw_watcher_arm(fx->watcher, w->conn, w->flag, mask, fx->mailbox,
                            cookie, &w->watch);
    CHECK(rc == 0 || rc == 1);
    CHECK(w->watch != 0);
    return rc;
}

void fixture_watch(fixture *fx, watched *out)
{
    fixture_attach(fx, out);
    CHECK_EQ(fixture_arm(fx, out, DW_MASK_ANY, 0), 0);
}

void fixture_drop(fixture *fx, watched *w)
{
    int rc = dw_watcher_detach(fx->watcher, w->conn);
    CHECK(rc == 0 || rc == DW_ESTALE);
    if (w->flag.generation)
        dw_flag_release(fx->flags, w->flag);
    net_close(&w->net);
}

void fixture_turn(fixture *fx)
{
    if (fx->setup->driver == DW_DRIVER_LOOP)
        CHECK(dw_watcher_poll(fx->watcher, 0) >= 0);
}

void fixture_settle(fixture *fx)
{
    watched witness = {.net = net_open(fx->setup->kind)};
    CHECK_EQ(dw_watcher_attach(fx->watcher, witness.net.server, &witness.conn),
             0);
    CHECK_EQ(dw_flag_alloc(fx->flags, &witness.flag), 0);
    CHECK_EQ(dw_watcher_arm(fx->watcher, witness.conn, witness.flag,
                            DW_MASK_ANY, NULL, 0, &witness.watch),
             0);
    net_leave(&witness.net, LEAVE_FIN);
    UNTIL(fx, fixture_reason(fx, &witness) == DW_REASON_FIN);
    fixture_drop(fx, &witness);
}

int fixture_reason(fixture *fx, const watched *w)
{
    int reason = dw_flag_reason(fx->flags, w->flag);
    CHECK(reason >= 0);
    return reason;
}

dw_conn_info fixture_info(fixture *fx, const watched *w)
{
    dw_conn_info info;
    CHECK_EQ(dw_watcher_info(fx->watcher, w->conn, &info), 0);
    return info;
}

dw_watcher_stats fixture_stats(fixture *fx)
{
    dw_watcher_stats stats;
    dw_watcher_read_stats(fx->watcher, &stats);
    return stats;
}

int fixture_drain(fixture *fx, dw_event events[16])
{
    return dw_mailbox_drain(fx->mailbox, events, 16);
}
