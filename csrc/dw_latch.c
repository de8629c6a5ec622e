#include "dw_latch.h"

static uint32_t next_step(uint32_t step)
{
    /* An ack of 0 would read as none. */
    return step == UINT32_MAX ? 1 : step + 1;
}

/* Whether the row's flag has fired. The slot's next tenant, whose generation is
 * another, says nothing of this row: dw_flag_reason tells the two apart. */
static int has_fired(const dw_flags *flags, dw_flag flag)
{
    return dw_flag_reason(flags, flag) > 0;
}

int dw_latch(dw_flags *flags, const dw_latch_rows *rows)
{
    uint32_t step = next_step(rows->control[DW_CONTROL_STEP]);
    uint32_t num_live = 0;
    for (size_t row = 0; row < rows->num_rows; row++) {
        if (!rows->live[row])
            continue;
        /* A slot of -1 lies outside the table, and so names no flag. */
        dw_flag flag = {.slot = (uint32_t)rows->slots[row],
                        .generation = (uint32_t)rows->generations[row]};
        if (!has_fired(flags, flag)) {
            num_live++;
            continue;
        }
        rows->live[row] = 0;
        rows->seq_lens[row] = 0;
        rows->slot_mapping[row] = -1;
        dw_flag_ack(flags, flag, step);
    }
    uint32_t go = num_live && rows->control[DW_CONTROL_STEPS_LEFT];
    rows->control[DW_CONTROL_STEP] = step;
    rows->control[DW_CONTROL_STEPS_LEFT] -= go;
    rows->control[DW_CONTROL_NUM_LIVE] = num_live;
    rows->control[DW_CONTROL_GO] = go;
    return (int)go;
}
