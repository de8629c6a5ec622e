/* Opt-ins change options of a socket that is not ours: each is put back, on every
 * way out. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

#define UNBLIND (1 << 20)

static const struct {
    int level;
    int name;
} touched[] = {
    {SOL_SOCKET, SO_KEEPALIVE},      {IPPROTO_TCP, TCP_KEEPIDLE},
    {IPPROTO_TCP, TCP_KEEPINTVL},    {IPPROTO_TCP, TCP_KEEPCNT},
    {IPPROTO_TCP, TCP_RTO_MAX_MS},   {SOL_SOCKET, SO_RCVLOWAT},
    {IPPROTO_TCP, TCP_USER_TIMEOUT}, /* never to be touched */
};

enum { NUM_TOUCHED = sizeof touched / sizeof touched[0] };

typedef struct {
    int values[NUM_TOUCHED]; /* -1: this kernel has no such option */
} options;

static options read_options(int fd)
{
    options all;
    for (int i = 0; i < NUM_TOUCHED; i++) {
        socklen_t size = sizeof all.values[i];
        if (getsockopt(fd, touched[i].level, touched[i].name, &all.values[i],
                       &size))
            all.values[i] = -1;
    }
    return all;
}

static int get_option(int fd, int level, int name)
{
    int value;
    socklen_t size = sizeof value;
    CHECK_EQ(getsockopt(fd, level, name, &value, &size), 0);
    return value;
}

static void check_same(const options *got, const options *want)
{
    for (int i = 0; i < NUM_TOUCHED; i++)
        CHECK_EQ(got->values[i], want->values[i]);
}

static void owner_with_defaults(int fd)
{
    (void)fd;
}

static void owner_with_keepalive(int fd)
{
    net_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    net_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);
    net_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 7);
    net_set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
    net_set_option(fd, SOL_SOCKET, SO_RCVLOWAT, 3);
}

typedef struct {
    const char *label;
    void (*prepare)(int fd);
} owner_case;

static const owner_case owners[] = {
    {"defaults", owner_with_defaults},
    {"own keepalive", owner_with_keepalive},
};

static void opt_in(fixture *fx, const watched *w)
{
    CHECK_EQ(dw_watcher_set_vanish(fx->watcher, w->conn, 30000), 0);
    CHECK_EQ(dw_watcher_set_probing(fx->watcher, w->conn, true), 0);
    CHECK_EQ(dw_watcher_unblind(fx->watcher, w->conn, UNBLIND), 0);
    CHECK_EQ(get_option(w->net.server, SOL_SOCKET, SO_KEEPALIVE), 1);
    CHECK_EQ(get_option(w->net.server, IPPROTO_TCP, TCP_KEEPIDLE), 1);
    CHECK(get_option(w->net.server, SOL_SOCKET, SO_RCVLOWAT) > 3);
}

static void end_by_opting_out(fixture *fx, watched *w)
{
    CHECK_EQ(dw_watcher_reblind(fx->watcher, w->conn), 0);
    CHECK_EQ(dw_watcher_set_vanish(fx->watcher, w->conn, 0), 0);
    CHECK_EQ(dw_watcher_set_probing(fx->watcher, w->conn, false), 0);
}

static void end_by_detach(fixture *fx, watched *w)
{
    CHECK_EQ(dw_watcher_detach(fx->watcher, w->conn), 0);
}

static void end_by_closing(fixture *fx, watched *w)
{
    (void)w;
    dw_watcher_close(fx->watcher);
}

static void end_after_a_second_opt_in(fixture *fx, watched *w)
{
    opt_in(fx, w);
    CHECK_EQ(dw_watcher_set_vanish(fx->watcher, w->conn, 2000), 0);
    CHECK_EQ(dw_watcher_detach(fx->watcher, w->conn), 0);
}

typedef struct {
    const char *label;
    void (*end)(fixture *fx, watched *w);
} end_case;

static const end_case ends[] = {
    {"opt-out", end_by_opting_out},
    {"detach", end_by_detach},
    {"watcher closed", end_by_closing},
    {"twice", end_after_a_second_opt_in},
};

TEST_CROSS(every_option_is_put_back, owner_case, owner, owners, end_case, how,
           ends)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    owner->prepare(w.net.server);
    options before = read_options(w.net.server);
    opt_in(&fx, &w);
    how->end(&fx, &w);
    options after = read_options(w.net.server);
    check_same(&after, &before);
    dw_watcher_detach(fx.watcher, w.conn);
    net_close(&w.net);
    fixture_close(&fx);
}

TEST(what_the_owner_has_set_meanwhile_stays_and_the_rest_is_put_back)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    options want = read_options(w.net.server);
    opt_in(&fx, &w);
    net_set_option(w.net.server, IPPROTO_TCP, TCP_KEEPIDLE, 33);
    want.values[1] = 33;
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    options after = read_options(w.net.server);
    check_same(&after, &want);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* So long as one of two wants keepalive, it stays on. */
TEST(each_opt_in_ends_alone)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    int fd = w.net.server;
    options before = read_options(fd);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 30000), 0);
    CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 10);
    CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_KEEPINTVL), 5);
    CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_KEEPCNT), 127);
    if (before.values[4] >= 0)
        CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_RTO_MAX_MS), 10000);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 1);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, false), 0);
    CHECK_EQ(get_option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 10);
    CHECK_EQ(get_option(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 0), 0);
    options after = read_options(fd);
    check_same(&after, &before);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(the_owners_shorter_keepalive_is_kept)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    owner_with_keepalive(w.net.server);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 30000), 0);
    CHECK_EQ(get_option(w.net.server, IPPROTO_TCP, TCP_KEEPIDLE), 2);
    CHECK_EQ(get_option(w.net.server, IPPROTO_TCP, TCP_KEEPINTVL), 5);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* The number is another socket's by now, which has its own options. */
TEST(a_socket_that_took_the_number_is_left_alone)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    opt_in(&fx, &w);
    net_pair next = net_open(NET_TCP);
    /* As opt_in left the first, so that only its being another one saves it. */
    options ours = read_options(w.net.server);
    for (int i = 0; i < NUM_TOUCHED; i++) {
        if (ours.values[i] >= 0)
            net_set_option(next.server, touched[i].level, touched[i].name,
                           ours.values[i]);
    }
    options before = read_options(next.server);
    CHECK_EQ(dup2(next.server, w.net.server), w.net.server);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 0), DW_EBADF);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, false), DW_EBADF);
    CHECK_EQ(dw_watcher_unblind(fx.watcher, w.conn, 1), DW_EBADF);
    CHECK_EQ(dw_watcher_reblind(fx.watcher, w.conn), DW_EBADF);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    options after = read_options(next.server);
    check_same(&after, &before);
    net_close(&next);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

static void free_in_child(void *arg)
{
    fixture *fx = arg;
    dw_mailbox_close(fx->mailbox);
    dw_watcher_free(fx->watcher);
}

TEST(a_forked_child_leaves_the_options_to_its_parent)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    options before = read_options(w.net.server);
    opt_in(&fx, &w);
    options ours = read_options(w.net.server);
    CHECK_IN_CHILD(free_in_child, &fx);
    options after = read_options(w.net.server);
    check_same(&after, &ours);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    after = read_options(w.net.server);
    check_same(&after, &before);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(opt_ins_refuse_what_they_cannot_mean)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    options before = read_options(w.net.server);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 1999), DW_EINVAL);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 86400001), DW_EINVAL);
    CHECK_EQ(dw_watcher_unblind(fx.watcher, w.conn, 0), DW_EINVAL);
    options after = read_options(w.net.server);
    check_same(&after, &before);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 2000), DW_ESTALE);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), DW_ESTALE);
    CHECK_EQ(dw_watcher_unblind(fx.watcher, w.conn, 1), DW_ESTALE);
    CHECK_EQ(dw_watcher_reblind(fx.watcher, w.conn), DW_ESTALE);
    CHECK_EQ(dw_watcher_vanish_bound(fx.watcher, w.conn), DW_ESTALE);
    CHECK_EQ(dw_watcher_reason(fx.watcher, w.conn), DW_ESTALE);
    dw_watcher_close(fx.watcher);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 2000), DW_ECLOSED);
    CHECK_EQ(dw_watcher_vanish_bound(fx.watcher, w.conn), DW_ECLOSED);
    CHECK_EQ(dw_watcher_reblind(fx.watcher, w.conn), DW_ECLOSED);
    net_close(&w.net);
    fixture_close(&fx);
}
