/* The latch: once a step, the cancel flags of a batch's rows become plain row
 * state that the kernels of the next step obey without a look at a flag.
 *
 *     latch ──► step ──► latch ──► step ──► latch     go = 0: the loop ends
 *       │ go = 1           │
 *       └ a flag fired:    └ its row is dead: live 0, seq_len 0, slot -1, acked
 *
 * A dead row keeps its place in the batch and costs next to nothing there: it
 * attends to no token and writes none, and no other row is changed by a bit.
 *
 * The ack says that no step up to the one it names touches the row's blocks
 * any more, and that none after it will: the latch runs between steps, behind
 * all work of the step before.
 *
 * This is what the device's latch kernel does, for rows in this memory.
 *
 * THREADS: one at a time for the same rows; flags may fire meanwhile.
 */
#ifndef DW_LATCH_H
#define DW_LATCH_H

#include <stddef.h>
#include <stdint.h>

#include "dw_flags.h"

/* Words of dw_latch_rows.control. */
enum dw_control {
    DW_CONTROL_STEP = 0,       /* latches so far; 0 is passed over at a wrap */
    DW_CONTROL_STEPS_LEFT = 1, /* that the loop may still run */
    DW_CONTROL_NUM_LIVE = 2,
    DW_CONTROL_GO = 3, /* 1: run one more step */
    DW_CONTROL_WORDS = 4
};

/* A batch's rows, [num_rows] each. */
typedef struct {
    size_t num_rows;
    const int32_t *slots; /* of each row's flag; -1: it has none */
    const int32_t *generations;
    int32_t *live;         /* 1, and 0 once the row is dead or done */
    int32_t *seq_lens;     /* how many tokens the row attends to */
    int64_t *slot_mapping; /* where its key and value go; -1: nowhere */
    uint32_t *control;
} dw_latch_rows;

/* OWNERSHIP: borrows all of it for the call. Who made a row holds a reference
 * to its flag until the row has ended.
 * RETURNS: 1 go on; 0 every row is dead or done, or no step is left. */
int dw_latch(dw_flags *flags, const dw_latch_rows *rows);

#endif
