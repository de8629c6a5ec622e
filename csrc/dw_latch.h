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
 *
 * The rows are in disconnect_watch.h, which native users share.
 */
#ifndef DW_LATCH_H
#define DW_LATCH_H

#include "dw_flags.h"

/* OWNERSHIP: borrows all of it for the call. Who made a row holds a reference
 * to its flag until the row has ended.
 * RETURNS: 1 go on; 0 every row is dead or done, or no step is left. */
int dw_latch(dw_flags *flags, const dw_latch_rows *rows);

/* The same for rows with several flags, each of which ends its row and is
 * acknowledged if it has fired: slots and generations are then [num_rows,
 * flags_per_row]. */
int dw_latch_many(dw_flags *flags, const dw_latch_rows *rows,
                  size_t flags_per_row);

#endif
