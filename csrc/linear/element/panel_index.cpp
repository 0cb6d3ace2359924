#include "linear/element/panel_index.h"

#include "api.h"
#include "base/caches.h"

namespace dynsparse {
namespace {

// Fewer entries per panel and major than this do not pay for visiting the major. By columns a visit
// loads and stores more, and the multiply-adds of both gradients are more than the loads anyway.
constexpr double WORTH_A_VISIT = 12, WORTH_A_VISIT_BY_COLUMNS = 24;
// As many minors of a panel as u16 can tell apart.
constexpr i64 MOST_MINORS = i64{1} << 16;

// What is needed to find the arrays, at the beginning of the memory.
struct Header {
  i64 size, panels, majors, entries;
  i64 lists;  // how many i32 for every entry; 0: those of a major and panel lie side by side
};

i64 rounded(i64 bytes) { return ceil_div(bytes, 64) * 64; }

i64 bytes_of(const Header& h) {
  const i64 visits = h.panels * h.majors;
  return rounded(sizeof(Header)) + rounded((visits + 1) * sizeof(i32)) +
         rounded(h.entries * sizeof(u16)) +
         (h.lists ? h.lists * rounded(h.entries * sizeof(i32)) : rounded(visits * sizeof(i32)));
}

Header header_of(i64 majors, i64 minors, i64 entries, i64 size, i64 lists) {
  return {size, ceil_div(most(minors, 1), size), majors, entries, lists};
}

// Calls visit(panel, first entry, end) for every panel of a major. False where its entries are not
// in ascending order.
template <class Visit>
bool split(const Header& header, const i32* ptr, const i32* idx, i64 major, Visit visit) {
  i64 p = ptr[major];
  const i64 end = ptr[major + 1];
  for (i64 panel = 0; panel < header.panels; panel++) {
    const i64 bound = (panel + 1) * header.size, from = p;
    while (p < end && idx[p] < bound) p++;
    visit(panel, from, p);
  }
  unsigned descends = p < end;
  for (i64 q = ptr[major] + 1; q < end; q++) descends |= idx[q - 1] >= idx[q];
  return !descends;
}

}  // namespace

PanelIndex panel_index(const void* memory) {
  const Header& h = *static_cast<const Header*>(memory);
  const char* at = static_cast<const char*>(memory) + rounded(sizeof(Header));
  const auto take = [&at](i64 bytes) {
    const char* piece = at;
    at += rounded(bytes);
    return piece;
  };
  const auto take_i32 = [&](i64 n) {
    return reinterpret_cast<const i32*>(take(n * sizeof(i32)));
  };
  const i64 visits = h.panels * h.majors;
  PanelIndex index = {h.size, h.panels, take_i32(visits + 1), nullptr, nullptr, nullptr, nullptr};
  index.idx = reinterpret_cast<const u16*>(take(h.entries * sizeof(u16)));
  if (h.lists) {
    index.order = take_i32(h.entries);
    if (h.lists > 1) index.inverse = take_i32(h.entries);
  } else {
    index.values = take_i32(visits);
  }
  return index;
}

}  // namespace dynsparse

using dynsparse::i32;
using dynsparse::i64;

i64 dynsparse_panels_from(i64 majors, i64 minors, i64 entries, i32 by_columns) {
  using namespace dynsparse;
  constexpr i64 NEVER = i64{1} << 62;
  const i64 tile = minors * TILE * static_cast<i64>(sizeof(float));
  const i64 second_level = second_level_cache();
  if (entries < 32 * majors) return NEVER;
  if (VL == 8) {  // measured on an EPYC (Zen 3)
    if (tile <= 2 * first_level_cache()) return NEVER;
    if (by_columns) return 4;
    // Without panels loads at short and irregular distances take several times as long, probably
    // because much of what the processor fetches ahead is not needed.
    const bool wide = tile >= second_level / 2;
    if (wide && entries >= majors * minors * 3 / 10) return 16;
    if (entries >= majors * minors / (wide ? 10 : 4)) return 24;
    return entries >= 200 * majors || tile >= 2 * second_level ? 64 : 256;
  }
  const bool crowded = tile >= second_level / 4;
  if (!crowded) return VL < 16 ? NEVER : 256;
  if (VL >= 16 || entries >= 200 * majors) return by_columns ? 16 : 64;
  return by_columns && entries >= 64 * majors ? 32 : 256;
}

i64 dynsparse_panels_size(i64 majors, i64 minors, i64 entries, i32 by_columns, i64 first_level) {
  using namespace dynsparse;
  // Half of the loads still find the first level, and visits are half as many as where all would.
  const i64 cache = first_level > 0 ? first_level : first_level_cache();
  const double cached = 2.0 * cache / (TILE * sizeof(float));
  const double worth = by_columns ? WORTH_A_VISIT_BY_COLUMNS : WORTH_A_VISIT;
  minors = most(minors, 1);
  const double useful = worth * majors * minors / most(entries, 1);
  const double size = useful > cached ? useful : cached;
  const i64 fitting = size < MOST_MINORS ? most(static_cast<i64>(size), LINE) : MOST_MINORS;
  const i64 even = ceil_div(minors, ceil_div(minors, fitting));
  return ceil_div(even, LINE) * LINE;
}

i64 dynsparse_panels_bytes(i64 majors, i64 minors, i64 entries, i64 size, i32 lists) {
  return dynsparse::bytes_of(dynsparse::header_of(majors, minors, entries, size, lists));
}

int dynsparse_panels_make(const i32* ptr, const i32* idx, const i32* order, i32 lists, i64 majors,
                          i64 minors, i64 size, void* memory, i32 threads) {
  using namespace dynsparse;
  Header& header = *static_cast<Header*>(memory);
  header = header_of(majors, minors, ptr[majors], size, lists);
  const PanelIndex index = panel_index(memory);
  i32* const starts = const_cast<i32*>(index.starts);
  u16* const to_idx = const_cast<u16*>(index.idx);
  i32* const to_values = const_cast<i32*>(index.values);
  i32* const to_order = const_cast<i32*>(index.order);
  i32* const inverse = const_cast<i32*>(index.inverse);

  bool ordered = true;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : ordered)
  for (i64 m = 0; m < majors; m++) {
    const bool ascends = split(header, ptr, idx, m, [&](i64 panel, i64 from, i64 end) {
      starts[panel * majors + m + 1] = static_cast<i32>(end - from);
    });
    ordered = ordered && ascends;
  }
  if (!ordered) return 1;
  starts[0] = 0;
  for (i64 i = 0; i < header.panels * majors; i++) starts[i + 1] += starts[i];

#pragma omp parallel for schedule(static) num_threads(threads)
  for (i64 m = 0; m < majors; m++) {
    split(header, ptr, idx, m, [&](i64 panel, i64 from, i64 end) {
      const i64 to = starts[panel * majors + m];
      const i32 base = static_cast<i32>(panel * header.size);
      for (i64 p = from; p < end; p++) to_idx[to + p - from] = static_cast<u16>(idx[p] - base);
      if (lists)
        std::memcpy(to_order + to, order + from, (end - from) * sizeof(i32));
      else
        to_values[panel * majors + m] = static_cast<i32>(from);
    });
  }
  if (!inverse) return 0;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (i64 entry = 0; entry < header.entries; entry++)
    inverse[to_order[entry]] = static_cast<i32>(entry);
  return 0;
}
