/* A peer that vanished without a word: its packets and ours go nowhere. Tried
 * in a network of its own, whose loopback device is switched off.
 */
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_sock.h"

/* RETURNS: false where this user may have no network of its own. */
static bool enter_network(void)
{
    if (!unshare(CLONE_NEWNET) || !unshare(CLONE_NEWUSER | CLONE_NEWNET))
        return true;
    fprintf(stderr, "skipped: no network namespace allowed here\n");
    return false;
}

static void switch_loopback(bool is_up)
{
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK(!ioctl(fd, SIOCGIFFLAGS, &request));
    if (is_up)
        request.ifr_flags |= IFF_UP;
    else
        request.ifr_flags &= (short)~IFF_UP;
    CHECK(!ioctl(fd, SIOCSIFFLAGS, &request));
    close(fd);
}

static void set_option(int fd, int level, int name, int value)
{
    CHECK(!setsockopt(fd, level, name, &value, sizeof value));
}

static void vanish_in_flight(int fd)
{
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 300);
    switch_loopback(false);
    net_send(fd, 1);
}

static void vanish_idle(int fd)
{
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 1);
    switch_loopback(false);
}

typedef struct {
    const char *label;
    void (*vanish)(int fd);
} vanish_case;

static const vanish_case vanish_cases[] = {
    {"with bytes in flight", vanish_in_flight},
    {"idle, by keepalive", vanish_idle},
};

TEST_EACH(a_peer_that_vanished_is_timed_out, vanish_case, how, vanish_cases)
{
    if (!enter_network())
        return;
    switch_loopback(true);
    fixture fx;
    watched w;
    fixture_open(&fx, &thread_setups[0]);
    fixture_watch(&fx, &w);
    how->vanish(w.net.server);
    CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_NONE);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_TIMED_OUT);
    CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_TIMED_OUT);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}
