#include "dw_mailbox.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "dw_base.h"

int dw_mailbox_create(dw_watcher *watcher, dw_mailbox **out)
{
    *out = NULL;
    const dw_fork_guard *guard = dw_watcher_guard(watcher);
    if (dw_fork_is_child(guard))
        return DW_EFORKED;
    int rc;
    dw_mailbox *mailbox = calloc(1, sizeof(*mailbox));
    if (!mailbox)
        return DW_ENOMEM;
    mailbox->watcher = watcher;
    mailbox->guard = guard;
    mailbox->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mailbox->fd < 0) {
        rc = -errno;
        goto fail_free;
    }
    pthread_mutex_init(&mailbox->lock, NULL);
    rc = dw_watcher_adopt(watcher, mailbox);
    if (rc)
        goto fail_close;
    *out = mailbox;
    return DW_OK;

fail_close:
    pthread_mutex_destroy(&mailbox->lock);
    close(mailbox->fd);
fail_free:
    free(mailbox);
    return rc;
}

static bool is_shut(const dw_mailbox *mailbox)
{
    /* Relaxed: pairs with the exchange in dw_mailbox_shut. Who must not miss it
     * asks with the mailbox's lock held, which shut takes before it closes. */
    return atomic_load_explicit(&mailbox->is_shut, memory_order_relaxed);
}

int dw_mailbox_fd(const dw_mailbox *mailbox)
{
    if (is_shut(mailbox))
        return DW_ECLOSED;
    return dw_fork_is_child(mailbox->guard) ? DW_EFORKED : mailbox->fd;
}

/* With the lock held. */
static void ring(dw_mailbox *mailbox)
{
    /* It cannot fail: nobody counts to 2^64 - 2 between two drains. */
    eventfd_write(mailbox->fd, 1);
    mailbox->state = DW_MAILBOX_RUNG;
}

void dw_mailbox_post(dw_mailbox *mailbox, dw_mail *mail, dw_mailbox **owed)
{
    pthread_mutex_lock(&mailbox->lock);
    mail->is_posted = true;
    mail->next = NULL;
    mail->prev = mailbox->last;
    if (mailbox->last)
        mailbox->last->next = mail;
    else
        mailbox->first = mail;
    mailbox->last = mail;
    if (mailbox->state == DW_MAILBOX_QUIET) {
        mailbox->state = DW_MAILBOX_OWED;
        mailbox->next_owed = *owed;
        *owed = mailbox;
    }
    pthread_mutex_unlock(&mailbox->lock);
}

void dw_mailbox_ring_all(dw_mailbox *owed)
{
    while (owed) {
        dw_mailbox *next = owed->next_owed;
        DW_SYNC_POINT("mailbox:ring-owed");
        pthread_mutex_lock(&owed->lock);
        ring(owed);
        pthread_mutex_unlock(&owed->lock);
        owed = next;
    }
}

/* With the lock held. */
static void take_out(dw_mailbox *mailbox, dw_mail *mail)
{
    if (mail->prev)
        mail->prev->next = mail->next;
    else
        mailbox->first = mail->next;
    if (mail->next)
        mail->next->prev = mail->prev;
    else
        mailbox->last = mail->prev;
    mail->is_posted = false;
}

void dw_mailbox_forget(dw_mailbox *mailbox, dw_mail *mail)
{
    pthread_mutex_lock(&mailbox->lock);
    if (mail->is_posted)
        take_out(mailbox, mail);
    pthread_mutex_unlock(&mailbox->lock);
}

int dw_mailbox_drain(dw_mailbox *mailbox, dw_event *events, size_t max_events)
{
    if (dw_fork_is_child(mailbox->guard))
        return is_shut(mailbox) ? 0 : DW_EFORKED;
    int num_events = 0;
    eventfd_t count;
    pthread_mutex_lock(&mailbox->lock);
    if (is_shut(mailbox))
        goto unlock;
    eventfd_read(mailbox->fd, &count);
    if (mailbox->is_ended) {
        num_events = DW_ECLOSED;
        goto unlock;
    }
    while (mailbox->first && (size_t)num_events < max_events) {
        events[num_events++] = mailbox->first->event;
        take_out(mailbox, mailbox->first);
    }
    if (mailbox->state == DW_MAILBOX_RUNG) {
        mailbox->state = DW_MAILBOX_QUIET;
        if (mailbox->first)
            ring(mailbox);
    }

unlock:
    pthread_mutex_unlock(&mailbox->lock);
    return num_events;
}

void dw_mailbox_wake(dw_mailbox *mailbox)
{
    if (dw_fork_is_child(mailbox->guard))
        return;
    pthread_mutex_lock(&mailbox->lock);
    if (mailbox->state == DW_MAILBOX_QUIET && !is_shut(mailbox))
        ring(mailbox);
    pthread_mutex_unlock(&mailbox->lock);
}

void dw_mailbox_end(dw_mailbox *mailbox)
{
    pthread_mutex_lock(&mailbox->lock);
    mailbox->is_ended = true;
    if (mailbox->state == DW_MAILBOX_QUIET)
        ring(mailbox);
    pthread_mutex_unlock(&mailbox->lock);
}

static bool is_owed(dw_mailbox *mailbox)
{
    pthread_mutex_lock(&mailbox->lock);
    bool owed = mailbox->state == DW_MAILBOX_OWED;
    pthread_mutex_unlock(&mailbox->lock);
    return owed;
}

void dw_mailbox_shut(dw_mailbox *mailbox)
{
    /* Relaxed: pairs with the loads in dw_mailbox_accept and is_shut, which the
     * locks taken below order. */
    if (atomic_exchange_explicit(&mailbox->is_shut, true, memory_order_relaxed))
        return;
    if (dw_fork_is_child(mailbox->guard)) {
        /* No lock: the threads that may hold them are not here. */
        close(mailbox->fd);
        return;
    }
    DW_SYNC_POINT("mailbox:shut-begun");
    dw_watcher_disown(mailbox->watcher, mailbox);
    /* No watch names it any more, so the write that a poster may still owe is
     * the last. */
    while (is_owed(mailbox))
        sched_yield();
    pthread_mutex_lock(&mailbox->lock);
    close(mailbox->fd);
    pthread_mutex_unlock(&mailbox->lock);
}

void dw_mailbox_close(dw_mailbox *mailbox)
{
    if (!mailbox)
        return;
    dw_mailbox_shut(mailbox);
    dw_watcher *watcher = mailbox->watcher;
    if (!dw_fork_is_child(mailbox->guard))
        pthread_mutex_destroy(&mailbox->lock);
    free(mailbox);
    dw_watcher_release(watcher);
}
