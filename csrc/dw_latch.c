#include "dw_latch.h"

static uint32_t next_step(uint32_t step)
{
    /* An ack of 0 would read as none. */
    return step == UINT32_MAX ? 1 : step + 1;
}

/* Acknowledges those flags in [first, end) that have fired, and returns whether
 * there are any. A slot's next tenant, whose generation is another, says nothing
 * of this row: dw_flag_reason tells the two apart. */
static int has_fired(dw_flags *flags, const dw_latch_rows *rows, size_t first,
                     size_t end, uint32_t step)
{
    int fired = 0;
    for (size_t i = first; i < end; i++) {
        /* A slot of -1 lies outside the table, and so names no flag. */
        dw_flag flag = {.slot = (uint32_t)rows->slots[i],
                        .generation = (uint32_t)rows->generations[i]};
        if (dw_flag_reason(flags, flag) > 0) {
            fired = 1;
            dw_flag_ack(flags, flag, step);
        }
    }
    return fired;
}

int dw_latch(dw_flags *flags, const dw_latch_rows *rows)
{
    return dw_latch_many(flags, rows, 1);
}

int dw_latch_many(dw_flags *flags, const dw_latch_rows *rows,
                  size_t flags_per_row)
{
    uint32_t step = next_step(rows->control[DW_CONTROL_STEP]);
    uint32_t num_live = 0;
    for (size_t row = 0; row < rows->num_rows; row++) {
        if (!rows->live[row])
            continue;
        size_t first = row * flags_per_row;
        if (!has_fired(flags, rows, first, first + flags_per_row, step)) {
            num_live++;
            continue;
        }
        rows->live[row] = 0;
        rows->seq_lens[row] = 0;
        rows->slot_mapping[row] = -1;
    }
    uint32_t go = num_live && rows->control[DW_CONTROL_STEPS_LEFT];
    rows->control[DW_CONTROL_STEP] = step;
    rows->control[DW_CONTROL_STEPS_LEFT] -= go;
    rows->control[DW_CONTROL_NUM_LIVE] = num_live;
    rows->control[DW_CONTROL_GO] = go;
    return (int)go;
}
