// Accumulation (forward, grad_input alone) with activations in the first-level cache.
//
// The entries of a group of rows are regrouped into cells, one per tile of columns. A tile is small
// enough for its packed activations to stay in the first-level cache, from where vectors come half
// as fast again as from the second. Inside a cell, rows go by their number of entries: rows of
// equal length are worked on four at a time, and loops this short are predicted only where they run
// equally often many times in a row.
//
// Regrouping copies index and values once per call, which many samples and many entries per cell
// repay.
#pragma once

#include "element.h"

namespace dynsparse {

// Whether `pass` is faster through cells.
bool cells_pay(const ElementPass& pass);

// False, with nothing done that counts, where scratch memory is not to be had or the index is not
// in ascending order.
bool run_in_cells(const ElementPass& pass);

}  // namespace dynsparse
