/* Which process is this, and is that one still there? A pid alone does not
 * tell, since numbers are reused: an identity is pid and start time in one
 * 64-bit word, so that it can be claimed by a single compare-and-swap.
 *
 * Holds between processes of one pid namespace.
 *
 * THREADS: any.
 */
#ifndef DW_PROCESS_H
#define DW_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* start time in clock ticks since boot << 22 | pid; never 0. Without /proc the
 * start time is 0 and the pid alone must do. */
typedef uint64_t dw_process_id;

dw_process_id dw_process_self(void);

/* True once no thread of that process can run again: it is gone, its number
 * names another process, or it waits to be reaped. False if in doubt. */
bool dw_process_is_dead(dw_process_id process);

#endif
