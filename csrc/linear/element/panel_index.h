// The entries of a pattern by panels, made once per pattern.
//
// A panel is a stretch of minors: so few that their packed activations stay in the caches. Inside a
// panel the entries follow one another in the order in which they are worked on, major by major.
#pragma once

#include "base/layout.h"

namespace dynsparse {

using u16 = uint16_t;

struct PanelIndex {
  i64 size;            // minors per panel
  i64 panels;
  const i32* starts;   // [panel][major], and one more: where the entries of each begin
  const u16* idx;      // [entry]: its minor, counted from the panel's first
  // Where the entries of a row and panel lie side by side among the values, too.
  const i32* values;   // [panel][major]: the first one's value; null otherwise
  // Otherwise.
  const i32* order;    // [entry]: where its value is
  const i32* inverse;  // [value]: which entry has it; null by rows
};

// What dynsparse_panels_make has written to `memory`.
PanelIndex panel_index(const void* memory);

}  // namespace dynsparse
