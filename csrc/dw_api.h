/* The core's part of the table that native users call it through: all but the
 * functions that take Python objects, which the binding adds.
 */
#ifndef DW_API_H
#define DW_API_H

#include "disconnect_watch.h"

extern const dw_api dw_api_core;

#endif
