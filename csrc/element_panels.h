// Products with unstructured sparsity where many samples repay a copy of the entries.
//
// The entries of a thread's majors are copied by panels of minors: a panel's packed activations are
// few enough to stay in the second-level cache, and the entries follow one another in the order
// they are worked on, so that index, weights and sums are streams. Dot products are collected in
// that order, too. Where the values have another (by columns), they are fetched and delivered a
// panel at a time: at delivery row by row, since reads from many places overlap, while a write
// waits for the one before it.
#pragma once

#include "element.h"

namespace dynsparse {

enum class Outcome { DONE, NO_MEMORY, UNORDERED };

// Whether this is the faster way for `pass`.
bool panels_pay(const ElementPass& pass);

// UNORDERED, with nothing done that counts, where the entries of a major are not in ascending order
// of their minors.
Outcome run_in_panels(const ElementPass& pass);

}  // namespace dynsparse
