#include "dw_optin.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "dw_error.h"

/* Linux 6.15; not in every libc's headers. */
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

#define NS_PER_MS UINT64_C(1000000)

/* The kernel's own cap on back-off, TCP_RTO_MAX, and an eighth for the grain of
 * its timers. */
#define LONGEST_BACKOFF_MS 135000U

/* The most there is: the kernel only asks, it is not to judge before we do. */
#define MOST_PROBES 127

static const struct {
    int level;
    int name;
} options[DW_NUM_OPTIONS] = {
    [DW_OPTION_KEEPIDLE] = {IPPROTO_TCP, TCP_KEEPIDLE},
    [DW_OPTION_KEEPINTVL] = {IPPROTO_TCP, TCP_KEEPINTVL},
    [DW_OPTION_KEEPCNT] = {IPPROTO_TCP, TCP_KEEPCNT},
    [DW_OPTION_RTO_MAX] = {IPPROTO_TCP, TCP_RTO_MAX_MS},
    [DW_OPTION_KEEPALIVE] = {SOL_SOCKET, SO_KEEPALIVE},
    [DW_OPTION_RCVLOWAT] = {SOL_SOCKET, SO_RCVLOWAT},
};

static int get(int fd, enum dw_option option, int *out)
{
    socklen_t size = sizeof(*out);
    if (getsockopt(fd, options[option].level, options[option].name, out, &size))
        return -errno;
    return DW_OK;
}

static int set(int fd, enum dw_option option, int value)
{
    if (setsockopt(fd, options[option].level, options[option].name, &value,
                   sizeof(value)))
        return -errno;
    return DW_OK;
}

static void put_back(dw_optin *optin, int fd, enum dw_option option)
{
    dw_saved_option *saved = &optin->saved[option];
    int now;
    if (saved->is_set && !get(fd, option, &now) && now == saved->ours)
        set(fd, option, saved->before);
    saved->is_set = false;
}

/* Sets it anew from the owner's value: to ours or, where the owner's is the
 * smaller, to that. */
static int borrow(dw_optin *optin, int fd, enum dw_option option, int ours,
                  bool is_owners_kept_if_less)
{
    dw_saved_option *saved = &optin->saved[option];
    put_back(optin, fd, option);
    int before;
    int rc = get(fd, option, &before);
    if (rc)
        return rc;
    if (is_owners_kept_if_less && before < ours)
        ours = before;
    rc = set(fd, option, ours);
    if (rc)
        return rc;
    /* The kernel may cap a value, and the capped one is what to look for. */
    get(fd, option, &ours);
    *saved = (dw_saved_option){.before = before, .ours = ours, .is_set = true};
    return DW_OK;
}

/* A third of the bound, so that two questions fit in it before the verdict. */
static int third(uint32_t vanish_ms, uint32_t unit_ms, int least)
{
    int value = (int)(vanish_ms / 3 / unit_ms);
    return value > least ? value : least;
}

/* Has the peer asked as often as what is on wants. */
static int ask(dw_optin *optin, int fd)
{
    int idle_s = 1, interval_s = 1;
    if (!optin->is_probing) {
        idle_s = third(optin->vanish_ms, 1000, 1);
        interval_s = third(optin->vanish_ms, 2000, 1);
    }
    int rc = borrow(optin, fd, DW_OPTION_KEEPIDLE, idle_s, true);
    if (!rc)
        rc = borrow(optin, fd, DW_OPTION_KEEPINTVL, interval_s, true);
    if (!rc)
        rc = borrow(optin, fd, DW_OPTION_KEEPCNT, MOST_PROBES, false);
    if (!rc)
        rc = borrow(optin, fd, DW_OPTION_KEEPALIVE, 1, false);
    return rc;
}

static int ask_or_stop(dw_optin *optin, int fd)
{
    int rc = DW_OK;
    if (optin->vanish_ms || optin->is_probing)
        rc = ask(optin, fd);
    if (rc) {
        optin->vanish_ms = 0;
        optin->bound_ms = 0;
        optin->is_probing = false;
    }
    if (!optin->vanish_ms && !optin->is_probing) {
        for (enum dw_option i = 0; i <= DW_OPTION_KEEPALIVE; i++)
            put_back(optin, fd, i);
    }
    return rc;
}

/* Keepalive says nothing while bytes wait to be sent: they are asked about by
 * retransmissions and window probes, which back off. RETURNS: whether that has
 * a cap now; before Linux 6.15 it cannot have. */
static bool cap_backoff(dw_optin *optin, int fd)
{
    if (!optin->vanish_ms) {
        put_back(optin, fd, DW_OPTION_RTO_MAX);
        return false;
    }
    int most_ms = third(optin->vanish_ms, 1, 1000);
    if (most_ms > 120000)
        most_ms = 120000;
    return !borrow(optin, fd, DW_OPTION_RTO_MAX, most_ms, true);
}

static uint32_t worst_case_ms(uint32_t vanish_ms, bool is_capped)
{
    uint32_t told_ms = LONGEST_BACKOFF_MS + vanish_ms / 4;
    if (is_capped || told_ms < vanish_ms)
        told_ms = vanish_ms;
    return told_ms + dw_optin_tick_ms(vanish_ms);
}

int dw_optin_set_vanish(dw_optin *optin, int fd, uint32_t vanish_ms)
{
    optin->vanish_ms = vanish_ms;
    optin->bound_ms = 0;
    int rc = ask_or_stop(optin, fd);
    if (rc)
        return rc;
    bool is_capped = cap_backoff(optin, fd);
    if (vanish_ms)
        optin->bound_ms = worst_case_ms(vanish_ms, is_capped);
    return DW_OK;
}

int dw_optin_set_probing(dw_optin *optin, int fd, bool is_on)
{
    if (optin->is_probing == is_on)
        return DW_OK;
    optin->is_probing = is_on;
    return ask_or_stop(optin, fd);
}

int dw_optin_unblind(dw_optin *optin, int fd, int num_bytes)
{
    return borrow(optin, fd, DW_OPTION_RCVLOWAT, num_bytes, false);
}

void dw_optin_reblind(dw_optin *optin, int fd)
{
    put_back(optin, fd, DW_OPTION_RCVLOWAT);
}

void dw_optin_restore(dw_optin *optin, int fd)
{
    for (enum dw_option i = 0; i < DW_NUM_OPTIONS; i++)
        put_back(optin, fd, i);
}

uint32_t dw_optin_tick_ms(uint32_t vanish_ms)
{
    uint32_t tick_ms = vanish_ms / 8;
    return tick_ms < 5000 ? tick_ms : 5000;
}

bool dw_optin_has_vanished(dw_optin *optin, const dw_sock_silence *silence,
                           uint64_t now_ns)
{
    if (!silence->is_asking)
        return false;
    uint64_t heard_ns = now_ns - silence->heard_ms_ago * NS_PER_MS;
    if (heard_ns > optin->asked_ns)
        optin->asked_ns = now_ns;
    return silence->heard_ms_ago >= optin->vanish_ms &&
           now_ns - optin->asked_ns >= optin->vanish_ms / 4 * NS_PER_MS;
}
