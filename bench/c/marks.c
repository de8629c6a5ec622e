/* callgrind's client requests, for Python to call through ctypes: begin to count
 * (under --instr-atstart=no, with which a program starts sooner), start the count
 * anew, and write out what was counted so far under a label. Outside of callgrind
 * they do nothing.
 */
#include <valgrind/callgrind.h>

void marks_begin(void);
void marks_zero(void);
void marks_dump(const char *label);

void marks_begin(void)
{
    CALLGRIND_START_INSTRUMENTATION;
}

void marks_zero(void)
{
    CALLGRIND_ZERO_STATS;
}

void marks_dump(const char *label)
{
    CALLGRIND_DUMP_STATS_AT(label);
}
