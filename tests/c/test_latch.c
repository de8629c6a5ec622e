/* The latch: fired flags become dead rows, and nothing else changes. */
#include "dw_latch.h"

#include <string.h>

#include "dw_test.h"

#define NUM_ROWS 4

typedef struct {
    dw_flags *flags;
    dw_flag flag[NUM_ROWS];
    int32_t slots[NUM_ROWS];
    int32_t generations[NUM_ROWS];
    int32_t live[NUM_ROWS];
    int32_t seq_lens[NUM_ROWS];
    int64_t slot_mapping[NUM_ROWS];
    uint32_t control[DW_CONTROL_WORDS];
    dw_latch_rows rows;
} batch;

static void begin(batch *b, uint32_t num_steps)
{
    CHECK_EQ(dw_flags_create(&b->flags), DW_OK);
    for (int i = 0; i < NUM_ROWS; i++) {
        CHECK_EQ(dw_flag_alloc(b->flags, &b->flag[i]), DW_OK);
        b->slots[i] = (int32_t)b->flag[i].slot;
        b->generations[i] = (int32_t)b->flag[i].generation;
        b->live[i] = 1;
        b->seq_lens[i] = 10 + i;
        b->slot_mapping[i] = 100 + i;
    }
    memset(b->control, 0, sizeof b->control);
    b->control[DW_CONTROL_STEPS_LEFT] = num_steps;
    b->rows = (dw_latch_rows){
        .num_rows = NUM_ROWS,
        .slots = b->slots,
        .generations = b->generations,
        .live = b->live,
        .seq_lens = b->seq_lens,
        .slot_mapping = b->slot_mapping,
        .control = b->control,
    };
}

static void end(batch *b)
{
    for (int i = 0; i < NUM_ROWS; i++)
        dw_flag_release(b->flags, b->flag[i]);
    dw_flags_free(b->flags);
}

static void cancel(batch *b, int row)
{
    CHECK_EQ(dw_flag_cancel(b->flags, b->flag[row], DW_REASON_FIN, 1), 1);
}

static uint32_t acked(const batch *b, int row)
{
    uint32_t step;
    CHECK_EQ(dw_flag_acked(b->flags, b->flag[row], &step), DW_OK);
    return step;
}

TEST(a_fired_flag_makes_its_row_dead_and_acks_the_step)
{
    batch b;
    begin(&b, 9);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 1);
    cancel(&b, 2);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 1);

    CHECK_EQ(b.live[2], 0);
    CHECK_EQ(b.seq_lens[2], 0);
    CHECK_EQ(b.slot_mapping[2], -1);
    CHECK_EQ(acked(&b, 2), 2);
    for (int i = 0; i < NUM_ROWS; i++) {
        if (i == 2)
            continue;
        CHECK_EQ(b.live[i], 1);
        CHECK_EQ(b.seq_lens[i], 10 + i);
        CHECK_EQ(b.slot_mapping[i], 100 + i);
        CHECK_EQ(acked(&b, i), 0);
    }
    CHECK_EQ(b.control[DW_CONTROL_NUM_LIVE], 3);
    end(&b);
}

TEST(a_dead_row_is_acked_once)
{
    batch b;
    begin(&b, 9);
    cancel(&b, 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dw_latch(b.flags, &b.rows), 1);
    CHECK_EQ(acked(&b, 0), 1);
    CHECK_EQ(b.control[DW_CONTROL_STEP], 3);
    end(&b);
}

TEST(the_flag_of_the_slots_next_tenant_leaves_the_row_alone)
{
    batch b;
    begin(&b, 9);
    b.generations[1]++;
    cancel(&b, 1);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 1);
    CHECK_EQ(b.live[1], 1);
    CHECK_EQ(acked(&b, 1), 0);
    end(&b);
}

TEST(a_row_without_a_flag_lives)
{
    batch b;
    begin(&b, 9);
    b.slots[3] = -1;
    cancel(&b, 3);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 1);
    CHECK_EQ(b.live[3], 1);
    end(&b);
}

TEST(the_loop_ends_after_its_steps)
{
    batch b;
    begin(&b, 3);
    int num_steps = 0;
    while (dw_latch(b.flags, &b.rows))
        num_steps++;
    CHECK_EQ(num_steps, 3);
    CHECK_EQ(b.control[DW_CONTROL_GO], 0);
    CHECK_EQ(b.control[DW_CONTROL_STEPS_LEFT], 0);
    CHECK_EQ(b.control[DW_CONTROL_STEP], 4);
    CHECK_EQ(b.control[DW_CONTROL_NUM_LIVE], NUM_ROWS);
    end(&b);
}

TEST(a_batch_that_died_before_the_loop_runs_no_step)
{
    batch b;
    begin(&b, 3);
    for (int i = 0; i < NUM_ROWS; i++)
        cancel(&b, i);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 0);
    CHECK_EQ(b.control[DW_CONTROL_STEPS_LEFT], 3);
    end(&b);
}

TEST(a_row_that_is_done_counts_no_more_and_is_not_acked)
{
    batch b;
    begin(&b, 3);
    for (int i = 0; i < NUM_ROWS; i++)
        b.live[i] = 0;
    cancel(&b, 0);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 0);
    CHECK_EQ(b.seq_lens[0], 10);
    CHECK_EQ(acked(&b, 0), 0);
    end(&b);
}

TEST(a_step_count_that_wraps_passes_over_0)
{
    batch b;
    begin(&b, 3);
    b.control[DW_CONTROL_STEP] = UINT32_MAX;
    cancel(&b, 0);
    CHECK_EQ(dw_latch(b.flags, &b.rows), 1);
    CHECK_EQ(acked(&b, 0), 1);
    end(&b);
}
