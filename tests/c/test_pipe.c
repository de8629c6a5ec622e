/* The write end of a pipe, whose reader leaves. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_sock.h"

static void attach_pipe(fixture *fx, watched *w, int *reader)
{
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    *reader = ends[0];
    *w = (watched){.net = {.server = ends[1], .client = -1}};
    CHECK_EQ(dw_watcher_attach(fx->watcher, ends[1], &w->conn), 0);
}

TEST_EACH(a_pipe_whose_reader_left_is_reset, watch_setup, setup, tcp_setups)
{
    fixture fx;
    watched w;
    int reader;
    fixture_open(&fx, setup);
    attach_pipe(&fx, &w, &reader);
    fixture_arm(&fx, &w, DW_MASK_GONE, 0);
    char bytes[64] = {0};
    CHECK_EQ(write(w.net.server, bytes, sizeof bytes), sizeof bytes);
    CHECK_EQ(read(reader, bytes, 10), 10);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_NONE);
    /* All opt-ins pass it by. */
    CHECK_EQ(dw_watcher_set_vanish(fx.watcher, w.conn, 2000), 0);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    CHECK_EQ(dw_watcher_unblind(fx.watcher, w.conn, 1000), 0);
    CHECK_EQ(dw_watcher_reblind(fx.watcher, w.conn), 0);
    CHECK_EQ(fixture_info(&fx, &w).vanish_bound_ms, 0);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    close(reader);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_RESET);
    CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_pipe_whose_reader_left_before_attach_is_reset, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    watched w;
    int ends[2];
    fixture_open(&fx, setup);
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    close(ends[0]);
    w = (watched){.net = {.server = ends[1], .client = -1}};
    CHECK_EQ(dw_watcher_attach(fx.watcher, ends[1], &w.conn), 0);
    fixture_arm(&fx, &w, DW_MASK_ANY, 0);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(a_pipe_that_took_a_number_is_told_from_the_one_before)
{
    fixture fx;
    watched first, second;
    int readers[2];
    fixture_open(&fx, &tcp_setups[0]);
    attach_pipe(&fx, &first, &readers[0]);
    dw_conn_id again;
    CHECK_EQ(dw_watcher_attach(fx.watcher, first.net.server, &again),
             DW_EEXIST);
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    readers[1] = ends[0];
    CHECK_EQ(dup2(ends[1], first.net.server), first.net.server);
    close(ends[1]);
    second = (watched){.net = {.server = first.net.server, .client = -1}};
    CHECK_EQ(dw_watcher_attach(fx.watcher, second.net.server, &second.conn), 0);
    CHECK_EQ(fixture_info(&fx, &first).reason, DW_REASON_OWNER_CLOSED);
    first.net.server = -1;
    fixture_drop(&fx, &first);
    fixture_drop(&fx, &second);
    close(readers[0]);
    close(readers[1]);
    fixture_close(&fx);
}

TEST(the_other_ends_of_pipes_are_refused)
{
    int ends[2];
    dw_sock_kind kind;
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    CHECK_EQ(dw_sock_identify(ends[0], &kind), DW_ENOTSOCK);
    CHECK_EQ(dw_sock_identify(ends[1], &kind), 0);
    CHECK_EQ(kind.family, AF_UNSPEC);
    /* Open both ways it has a reader for ever: itself. */
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", ends[1]);
    int both = open(path, O_RDWR | O_CLOEXEC);
    CHECK(both >= 0);
    CHECK_EQ(dw_sock_identify(both, &kind), DW_ENOTSOCK);
    CHECK_EQ(dw_sock_is_gone(ends[0]), DW_ENOTSOCK);
    close(both);
    close(ends[0]);
    close(ends[1]);
}
