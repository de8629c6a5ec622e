/* Inside the core: the opt-ins of one connection, kept out of line because few
 * ask for them. Each changes options of the borrowed socket and puts back what
 * it found, unless the owner has set another value meanwhile.
 *
 *     vanish    keepalive, so that an idle peer has something to answer, and a
 *               cap on the kernel's back-off, so that each question comes soon.
 *               It is we who judge the silence (dw_optin_has_vanished), since
 *               the kernel's own verdict, TCP_USER_TIMEOUT, also strikes a peer
 *               that answers each probe and merely does not read.
 *     probing   keepalive each second after the peer's FIN: a peer that only
 *               shut its sending side answers, one that closed resets at last.
 *     unblind   SO_RCVLOWAT while nobody reads: the receive buffer grows, so
 *               that a FIN behind unread bytes can come in.
 *
 * Of vanish and probing the shorter interval holds while both are on.
 *
 * THREADS: every function with the connection's lock held by the caller.
 */
#ifndef DW_OPTIN_H
#define DW_OPTIN_H

#include <stdbool.h>
#include <stdint.h>

#include "dw_sock.h"

enum dw_option {
    DW_OPTION_KEEPIDLE,
    DW_OPTION_KEEPINTVL,
    DW_OPTION_KEEPCNT,
    DW_OPTION_RTO_MAX,
    DW_OPTION_KEEPALIVE, /* after what it goes by */
    DW_OPTION_RCVLOWAT,
    DW_NUM_OPTIONS
};

typedef struct {
    int before; /* the owner's */
    int ours;   /* what the kernel made of our value */
    bool is_set;
} dw_saved_option;

typedef struct {
    uint32_t vanish_ms; /* 0: off */
    uint32_t bound_ms;  /* 0: off */
    bool is_probing;
    uint64_t asked_ns; /* when we first saw that the last question waits */
    dw_saved_option saved[DW_NUM_OPTIONS];
} dw_optin;

#define DW_VANISH_LEAST_MS 2000U     /* two of keepalive's least intervals */
#define DW_VANISH_MOST_MS  86400000U /* a day; keepalive's own end is 9 hours */

static inline bool dw_optin_is_bound(uint32_t vanish_ms)
{
    return vanish_ms >= DW_VANISH_LEAST_MS && vanish_ms <= DW_VANISH_MOST_MS;
}

/* vanish_ms 0: off. On an error, which is setsockopt's, both are off and the
 * options as they were. */
int dw_optin_set_vanish(dw_optin *optin, int fd, uint32_t vanish_ms);
int dw_optin_set_probing(dw_optin *optin, int fd, bool is_on);
int dw_optin_unblind(dw_optin *optin, int fd, int num_bytes);
void dw_optin_reblind(dw_optin *optin, int fd);

/* Puts every option back. */
void dw_optin_restore(dw_optin *optin, int fd);

/* How often to look at a connection with this bound. */
uint32_t dw_optin_tick_ms(uint32_t vanish_ms);

/* Takes in what is known of the peer's silence now. RETURNS: true once a
 * question has gone unanswered for a while and nothing at all was heard for
 * vanish_ms. The while is there for a live peer whose silence was long because
 * nobody asked: the answer may be under way. */
bool dw_optin_has_vanished(dw_optin *optin, const dw_sock_silence *silence,
                           uint64_t now_ns);

#endif
