#include "dw_api.h"

#include "dw_clock.h"
#include "dw_error.h"
#include "dw_flags.h"
#include "dw_latch.h"
#include "dw_sock.h"
#include "dw_watch.h"

const dw_api dw_api_core = {
    .abi_version = DW_ABI_VERSION,
    .size = sizeof(dw_api),
    .strerror = dw_strerror,
    .clock_ns = dw_clock_ns,
    .flag_alloc = dw_flag_alloc,
    .flag_retain = dw_flag_retain,
    .flag_release = dw_flag_release,
    .flag_cancel = dw_flag_cancel,
    .flag_reason = dw_flag_reason,
    .flag_address = dw_flag_address,
    .flags_wait = dw_flags_wait,
    .sock_is_gone = dw_sock_is_gone,
    .watcher_attach = dw_watcher_attach,
    .watcher_detach = dw_watcher_detach,
    .watcher_arm = dw_watcher_arm,
    .watcher_disarm = dw_watcher_disarm,
    .watcher_lost = dw_watcher_lost,
    .mailbox_create = dw_mailbox_create,
    .mailbox_fd = dw_mailbox_fd,
    .mailbox_drain = dw_mailbox_drain,
    .mailbox_wake = dw_mailbox_wake,
    .mailbox_close = dw_mailbox_close,
    .watcher_reason = dw_watcher_reason,
    .watcher_set_vanish = dw_watcher_set_vanish,
    .watcher_vanish_bound = dw_watcher_vanish_bound,
    .watcher_set_probing = dw_watcher_set_probing,
    .watcher_unblind = dw_watcher_unblind,
    .watcher_reblind = dw_watcher_reblind,
    .latch = dw_latch,
    .flag_ack = dw_flag_ack,
};
