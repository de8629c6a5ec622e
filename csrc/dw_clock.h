/* One clock for every timestamp: CLOCK_MONOTONIC, which all processes of a
 * machine share and which Python calls time.monotonic_ns().
 */
#ifndef DW_CLOCK_H
#define DW_CLOCK_H

#include <stdint.h>

uint64_t dw_clock_ns(void);

#endif
