/* A peer that vanished, told from one that merely has nothing to say or does not
 * read. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "dw_clock.h"
#include "dw_fixture.h"
#include "dw_optin.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

#define NS_PER_MS UINT64_C(1000000)

/* One look after the other: what is known then, and the verdict it must give. */
typedef struct {
    uint64_t at_ms;
    uint64_t heard_ms_ago;
    bool is_asking;
    bool has_vanished;
} look_case;

static void check_looks(const look_case *looks, size_t num_looks)
{
    dw_optin optin = {.vanish_ms = 4000};
    for (size_t i = 0; i < num_looks; i++) {
        dw_sock_silence silence = {looks[i].heard_ms_ago, looks[i].is_asking};
        uint64_t now_ns = (1000000 + looks[i].at_ms) * NS_PER_MS;
        CHECK_EQ(dw_optin_has_vanished(&optin, &silence, now_ns),
                 looks[i].has_vanished);
    }
}

#define CHECK_LOOKS(looks) \
    check_looks(looks, sizeof(looks) / sizeof((looks)[0]))

TEST(silence_alone_is_no_leave)
{
    static const look_case looks[] = {
        {0, 100000, false, false},
        {5000, 105000, false, false},
    };
    CHECK_LOOKS(looks);
}

TEST(a_peer_is_gone_once_it_was_asked_and_silent_for_the_bound)
{
    static const look_case looks[] = {
        {0, 1500, true, false},
        {1000, 2500, true, false},
        {2000, 3500, true, false},
        {2500, 4000, true, true},
    };
    CHECK_LOOKS(looks);
}

/* It was silent long before it was asked, and may be about to answer. */
TEST(a_question_waits_for_its_answer_however_long_the_silence)
{
    static const look_case looks[] = {
        {0, 90000, true, false},
        {999, 90999, true, false},
        {1000, 91000, true, true},
    };
    CHECK_LOOKS(looks);
}

/* Between two looks it answered one question and was asked the next. */
TEST(an_answer_starts_the_wait_anew)
{
    static const look_case looks[] = {
        {0, 90000, true, false},
        {90000, 89500, true, false},
        {90500, 90000, true, false},
        {91000, 90500, true, true},
    };
    CHECK_LOOKS(looks);
}

TEST(an_answer_without_a_further_question_ends_the_wait)
{
    static const look_case looks[] = {
        {0, 3900, true, false},
        {100, 50, false, false},
        {90000, 89950, true, false},
        {91000, 90950, true, true},
    };
    CHECK_LOOKS(looks);
}

static uint64_t heard_ms_ago(int fd)
{
    dw_sock_silence silence;
    CHECK_EQ(dw_sock_silence_of(fd, &silence), 0);
    CHECK(!silence.is_asking);
    return silence.heard_ms_ago;
}

/* The kernel's time of the last acknowledgement stays as it was. */
TEST(data_that_acknowledges_nothing_new_ends_a_silence)
{
    net_pair net = net_open(NET_TCP);
    net_send(net.client, 1);
    WAIT_UNTIL(heard_ms_ago(net.server) >= 200);
    net_send(net.client, 1);
    CHECK(heard_ms_ago(net.server) < 200);
    net_close(&net);
}

typedef struct {
    const char *label;
    void (*before)(net_pair *net);
    void (*after)(net_pair *net);
    bool is_vanishing;
} silent_case;

static void nothing(net_pair *net)
{
    (void)net;
}

static void fill(net_pair *net)
{
    net_fill(net->server);
}

static void send_a_byte(net_pair *net)
{
    net_send(net->server, 1);
}

static const silent_case silents[] = {
    {"vanished while idle", nothing, nothing, true},
    {"vanished with a byte in flight", nothing, send_a_byte, true},
    {"vanished with a full send buffer", fill, nothing, true},
    {"idle", nothing, nothing, false},
    {"does not read", fill, nothing, false},
};

enum { NUM_SILENTS = sizeof silents / sizeof silents[0] };

/* All at the same time, since each takes the bound. */
TEST_EACH(who_vanished_is_timed_out_and_who_does_not_read_is_not, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    watched all[NUM_SILENTS];
    fixture_open(&fx, setup);
    for (int i = 0; i < NUM_SILENTS; i++) {
        fixture_watch(&fx, &all[i]);
        CHECK_EQ(dw_watcher_set_vanish(fx.watcher, all[i].conn, 2000), 0);
        silents[i].before(&all[i].net);
    }
    watched unarmed, told;
    fixture_attach(&fx, &unarmed);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, unarmed.conn, 2000), 0);
    fixture_attach(&fx, &told);
    fixture_arm(&fx, &told, DW_MASK(DW_REASON_FIN), 0);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, told.conn, 2000), 0);
    CHECK_EQ(dw_watcher_lost(fx.watcher, told.conn, DW_REASON_RESET), 1);
    net_vanish(unarmed.net.client);
    net_vanish(told.net.client);
    uint64_t start_ns = dw_clock_ns();
    for (int i = 0; i < NUM_SILENTS; i++) {
        if (silents[i].is_vanishing)
            net_vanish(all[i].net.client);
        silents[i].after(&all[i].net);
    }
    for (int i = 0; i < NUM_SILENTS; i++) {
        if (!silents[i].is_vanishing)
            continue;
        UNTIL(&fx, fixture_reason(&fx, &all[i]) != DW_REASON_NONE);
        CHECK_EQ(fixture_reason(&fx, &all[i]), DW_REASON_TIMED_OUT);
        CHECK_EQ(net_try_receive(all[i].net.server), -EAGAIN);
    }
    /* Those who live have been silent for longer than the bound by now. */
    uint64_t end_ns = start_ns + 4500 * NS_PER_MS;
    UNTIL(&fx, dw_clock_ns() > end_ns);
    for (int i = 0; i < NUM_SILENTS; i++) {
        if (!silents[i].is_vanishing)
            CHECK_EQ(fixture_reason(&fx, &all[i]), DW_REASON_NONE);
        fixture_drop(&fx, &all[i]);
    }
    /* Nobody waited for the one, and the other had been told of. */
    CHECK_EQ(dw_watcher_reason(fx.watcher, unarmed.conn), DW_REASON_NONE);
    CHECK_EQ(fixture_stats(&fx).num_second_sources, 0);
    fixture_arm(&fx, &unarmed, DW_MASK_GONE, 0);
    UNTIL(&fx, fixture_reason(&fx, &unarmed) == DW_REASON_TIMED_OUT);
    fixture_drop(&fx, &unarmed);
    fixture_drop(&fx, &told);
    fixture_close(&fx);
}

TEST(the_worst_case_can_be_read_and_ticks_end_with_the_last_that_wants_them)
{
    fixture fx;
    watched first, second;
    fixture_open(&fx, &tcp_setups[1]);
    fixture_attach(&fx, &first);
    fixture_attach(&fx, &second);
    CHECK_EQ(fixture_info(&fx, &first).vanish_bound_ms, 0);
    CHECK_EQ(dw_watcher_vanish_bound(fx.watcher, first.conn), 0);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, second.conn, 80000), 0);
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, first.conn, 2000), 0);
    int cap_ms;
    socklen_t size = sizeof cap_ms;
    bool is_capped = !getsockopt(first.net.server, IPPROTO_TCP, TCP_RTO_MAX_MS,
                                 &cap_ms, &size);
    CHECK_EQ(fixture_info(&fx, &first).vanish_bound_ms,
             is_capped ? 2250 : 135750);
    CHECK_EQ(dw_watcher_vanish_bound(fx.watcher, first.conn),
             fixture_info(&fx, &first).vanish_bound_ms);
    CHECK_EQ(fixture_info(&fx, &second).vanish_bound_ms,
             is_capped ? 85000 : 160000);
    CHECK_EQ(dw_watcher_poll(fx.watcher, 4000), 1);

    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, first.conn, 0), 0);
    CHECK_EQ(fixture_info(&fx, &first).vanish_bound_ms, 0);
    CHECK_EQ(dw_watcher_detach(fx.watcher, second.conn), 0);
    dw_watcher_poll(fx.watcher, 0);
    CHECK_EQ(dw_watcher_poll(fx.watcher, 300), 0);
    fixture_drop(&fx, &first);
    fixture_drop(&fx, &second);
    fixture_close(&fx);
}
