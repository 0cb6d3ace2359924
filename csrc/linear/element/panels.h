// Products with unstructured sparsity, by panels of minors (panel_index.h).
//
// The packed activations of a panel stay in the second-level cache, and index, weights and sums are
// streams, since they have the order in which the entries are worked on. Values are brought to that
// order, and the sums back to theirs, once per call. Both times the reads are from here and there
// and the writes in order: reads from many places overlap, while a write waits for the one before.
#pragma once

#include "linear/element/element.h"

namespace dynsparse {

// Needs pass.panels. False where scratch memory is not to be had.
bool run_in_panels(const ElementPass& pass);

}  // namespace dynsparse
