// Pattern updates, growth and dropout, against the same said plainly.

#include <numeric>

#include "pattern.h"

namespace {

template <class T>
std::vector<T> vector_of(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

// A pattern as a file has it: gaps or a mask.
std::vector<uint8_t> packed(const Index& index, bool gaps, i64 height, i64 width) {
  std::vector<uint8_t> bytes(gaps ? 0 : (height * width + 7) / 8);
  i64 next = 0;
  for (i64 p = 0; p < index.nnz; p++) {
    const i64 position = index.row[p] * width + index.col[p];
    if (gaps) {
      bytes.insert(bytes.end(), (position - next) / 255, 255);
      bytes.push_back((position - next) % 255);
    } else {
      bytes[position / 8] |= 1 << position % 8;
    }
    next = position + 1;
  }
  return bytes;
}

// Unpacked as it was; damaged, refused or an index all the same.
void unpack_case(const Library& library, Random& random, const Index& index, i64 height,
                 i64 width) {
  const bool gaps = random.chance(50);
  std::vector<uint8_t> bytes = packed(index, gaps, height, width);
  Array<i32> row_ptr(random, height + 1), cols(random, index.nnz), col_ptr(random, width + 1);
  const auto unpack = [&] {
    const Array<uint8_t> file(random, bytes);
    return library.pattern_unpack(file.data(), file.size(), gaps, height, width, index.nnz,
                                  row_ptr.data(), cols.data(), col_ptr.data());
  };
  expect(unpack() == 0, "status");
  expect(row_ptr == index.row_ptr && cols == index.cols && col_ptr == index.col_ptr, "unpacked");
  if (bytes.empty()) return;
  bytes[random.below(bytes.size())] ^= 1 << random.below(8);
  if (random.chance(30)) bytes.resize(random.below(bytes.size()));
  if (unpack() == 0)
    for (i64 r = 0; r < height; r++)
      for (i32 p = row_ptr[r]; p < row_ptr[r + 1]; p++)
        expect(cols[p] >= 0 && cols[p] < width && (p == row_ptr[r] || cols[p - 1] < cols[p]),
               "an index of damaged bytes");
}

}  // namespace

void index_case(const Library& library, Random& random) {
  const bool large = random.chance(10);  // enough for several threads
  const i64 height = 1 + random.below(large ? 3000 : 60);
  const i64 width = 1 + random.below(large ? 900 : 60);
  const Index index = make_index(random, height, width, 1, large ? 60000 : 2000);
  const i32 threads = 1 + random.below(6);
  Array<i32> col_ptr(random, width + 1), csc_rows(random, index.nnz), csc_perm(random, index.nnz);
  expect(library.pattern_by_columns(index.row_ptr.data(), index.cols.data(), nullptr, height,
                                    width, col_ptr.data(), csc_rows.data(), csc_perm.data(),
                                    threads) == 0, "status");
  expect(col_ptr == index.col_ptr && csc_rows == index.csc_rows && csc_perm == index.csc_perm,
         "the order by columns");
  std::vector<i32> numbers(index.nnz);
  for (i32& number : numbers) number = random.below(1 << 30);
  const Array<i32> slots(random, numbers);
  expect(library.pattern_by_columns(index.row_ptr.data(), index.cols.data(), slots.data(), height,
                                    width, col_ptr.data(), csc_rows.data(), csc_perm.data(),
                                    threads) == 0, "status");
  for (i64 p = 0; p < index.nnz; p++)
    expect(csc_perm[p] == numbers[index.csc_perm[p]], "slots by columns");
  Array<uint16_t> masks(random, height * ((width + 15) / 16));
  library.small_masks(index.row_ptr.data(), index.cols.data(), masks.data(), height, width,
                      threads);
  i64 bits = 0;
  for (i64 i = 0; i < masks.size(); i++) bits += __builtin_popcount(masks[i]);
  expect(bits == index.nnz, "bits of the masks");
  // What does not ascend is refused.
  if (index.nnz > 1 && index.row[0] == index.row[1]) {
    std::vector<i32> wrong = vector_of(index.cols);
    std::swap(wrong[0], wrong[1]);
    const Array<i32> cols(random, wrong);
    const i64 bytes = library.panels_bytes(height, width, index.nnz, 64, 0);
    Array<uint8_t> memory(random, (bytes + 7) / 8 * 8);
    expect(library.panels_make(index.row_ptr.data(), cols.data(), nullptr, 0, height, width,
                               64, memory.data(), threads) == 1, "panels of an index out of order");
  }
  unpack_case(library, random, index, height, width);
  if (random.chance(20)) library.release_scratch();
}

void update_case(const Library& library, Random& random) {
  const int kind = random.below(10);  // small, large, or with positions past 2^31
  i64 height = 1 + random.below(40), width = 1 + random.below(40), most = 1000;
  if (kind == 0) height = 1 + random.below(2000), width = 1 + random.below(500), most = 50000;
  if (kind == 1) height = 60000 + random.below(9000), width = 60000 + random.below(9000);
  const Index index = make_index(random, height, width, 1, most);
  std::set<i64> taken, free;
  for (i64 p = 0; p < index.nnz; p++) taken.insert(i64{index.row[p]} * width + index.col[p]);
  std::vector<i64> drop;
  for (i64 p = 0; p < index.nnz; p++)
    if (random.chance(30)) drop.push_back(p);
  for (const i64 flat : some_positions(random, height, width, most / 2))
    if (!taken.count(flat)) free.insert(flat);
  std::vector<i64> grow(free.begin(), free.end());
  if (random.chance(60)) grow.resize(std::min(grow.size(), drop.size()));  // as in a training
  if (random.chance(60)) drop.resize(std::min(grow.size(), drop.size()));
  int wanted = 0;
  if (random.chance(8) && grow.size() > 1) std::swap(grow[0], grow[1]), wanted = 2;
  else if (random.chance(8) && index.nnz && grow.size()) {
    grow.push_back(*taken.begin());  // taken, unless it was dropped
    std::sort(grow.begin(), grow.end());
    wanted = drop.size() && drop[0] == 0 ? 0 : 2;
  } else if (random.chance(8)) grow.push_back(height * width), wanted = 2;
  // Entry p is in slot slots[p].
  const bool sorted = random.chance(40), reuses = random.chance(60);
  std::vector<i32> slots(index.nnz);
  std::iota(slots.begin(), slots.end(), 0);
  if (!sorted)
    for (i64 p = index.nnz - 1; p > 0; p--) std::swap(slots[p], slots[random.below(p + 1)]);
  std::vector<uint8_t> leaves(index.nnz);
  for (const i64 p : drop) leaves[slots[p]] = 1;
  std::vector<i64> reused;
  for (std::size_t g = 0; g < grow.size(); g++) reused.push_back(random.below(1 << 30));
  const Array<uint8_t> leaves_array(random, leaves);
  const Array<i32> slots_array(random, slots);
  const Array<i64> grow_array(random, grow), reused_array(random, reused);
  const i64 count = index.nnz - drop.size() + grow.size();
  Array<i32> row_ptr(random, height + 1), cols(random, count), source(random, count);
  const i32 threads = 1 + random.below(6);
  const int status = library.pattern_merge(
      index.row_ptr.data(), index.cols.data(), sorted ? nullptr : slots_array.data(), height, width,
      leaves_array.data(), drop.size(), grow_array.data(), grow.size(),
      reuses ? reused_array.data() : nullptr, row_ptr.data(), cols.data(), source.data(), threads);
  expect(status == wanted, "the status of a merge");
  if (status) return;
  std::vector<std::pair<i64, i32>> all;  // flat position, source
  for (i64 p = 0; p < index.nnz; p++)
    if (!std::binary_search(drop.begin(), drop.end(), p))
      all.emplace_back(i64{index.row[p]} * width + index.col[p], slots[p]);
  for (std::size_t g = 0; g < grow.size(); g++) all.emplace_back(grow[g], reuses ? reused[g] : -1);
  std::sort(all.begin(), all.end());
  expect(static_cast<i64>(all.size()) == count, "the count of a merge");
  for (i64 r = 0, p = 0; r < height; r++) {
    expect(row_ptr[r] == p, "row pointers of a merge");
    for (; p < row_ptr[r + 1]; p++)
      expect(r * width + cols[p] == all[p].first && source[p] == all[p].second, "a merge");
  }
  expect(row_ptr[height] == count, "the last row pointer of a merge");
  if (count != index.nnz || reuses) return;  // sources lie within arrays of as many entries

  std::vector<Array<uint8_t>> arrays;
  std::vector<std::vector<uint8_t>> expected;
  std::vector<void*> data;
  std::vector<i64> bytes;
  for (i64 i = random.below(5); i >= 0; i--) {
    const i64 size = random.among({1, 2, 4, 8, 12, 16, 64, 100});
    Array<uint8_t> array(random, count * size);
    for (i64 k = 0; k < array.size(); k++) array[k] = random.below(256);
    std::vector<uint8_t> after(array.size());
    for (i64 p = 0; p < count; p++)
      if (source[p] >= 0)
        std::memcpy(&after[p * size], array.data() + source[p] * size, size);
    bytes.push_back(size);
    data.push_back(array.data());
    expected.push_back(after);
    arrays.push_back(std::move(array));
  }
  for (std::size_t i = 0; i < arrays.size() && count; i++) {
    Array<uint8_t> moved(random, count * bytes[i]);
    library.pattern_move(data[i], bytes[i], source.data(), count, moved.data(), threads);
    expect(vector_of(moved) == expected[i], "an array that moves");
  }
}

void growth_case(const Library& library, Random& random) {
  const i32 threads = 1 + random.below(6);
  const bool large = random.chance(10);
  const i64 block = large ? 1 : random.among({1, 2, 3, 8, 16, 1000});
  const i64 rows = 1 + random.below(large ? 300 : block > 100 ? 1 : 20);
  const i64 width = 1 + random.below(large ? 3000 : block > 100 ? 2 : 50);
  Array<float> grad(random, rows * block * width * block), scores(random, rows * width);
  grad.fill(random);
  if (random.chance(30)) grad[random.below(grad.size())] = NAN;
  grad.freeze();
  const int pooling = random.below(3);
  library.grow_pool(grad.data(), rows, width, block, pooling, scores.data(), threads);
  for (i64 i = 0; i < scores.size(); i++) {
    double sum = 0, largest = 0;
    for (i64 u = 0; u < block; u++)
      for (i64 v = 0; v < block; v++) {
        const i64 row = i / width * block + u, col = i % width * block + v;
        const double g = std::fabs(grad[row * width * block + col]);
        sum += g;
        largest = g > largest || g != g ? g : largest;
      }
    const double wanted = pooling == 0 ? sum : pooling == 1 ? sum / (block * block) : largest;
    expect(std::fabs(scores[i] - wanted) <= 1e-4 * sum || sum != sum, "a pooled score");
  }

  // A chunk of a taller pattern.
  const i64 above = random.below(5);
  const Index index = make_index(random, above + rows, width, 1, rows * width / 4 + 1);
  std::set<i64> taken;
  for (i64 p = 0; p < index.nnz; p++) taken.insert((index.row[p] - above) * width + index.col[p]);
  const float threshold = random.chance(30) ? -1.0f : std::fabs(random.number());
  for (i64 i = 0; i < scores.size(); i++) {
    scores[i] = random.number();
    if (random.chance(2)) scores[i] = NAN;
  }
  std::vector<i64> wanted;
  for (i64 i = 0; i < scores.size(); i++)
    if (!taken.count(i) && std::fabs(scores[i]) > threshold) wanted.push_back(i);
  const i64 room = random.below(scores.size() + 2), offset = random.below(1000) << 32;
  Array<float> found_scores(random, room);
  Array<i64> found_flat(random, room);
  const i64 found = library.grow_scan(scores.data(), rows, width, index.row_ptr.data() + above,
                                      index.cols.data(), threshold, scores.size(), offset,
                                      found_scores.data(), found_flat.data(), room, threads);
  expect(found == static_cast<i64>(wanted.size()), "how many scores exceed the threshold");
  if (found <= room)
    for (i64 i = 0; i < found; i++)
      expect(found_flat[i] == offset + wanted[i] &&
             found_scores[i] == std::fabs(scores[wanted[i]]), "what a scan finds");

}

void screen_case(const Library& library, Random& random) {
  if (!library.grow_screens()) return;
  const bool large = random.chance(10);
  const i64 above = random.below(5), rows = 1 + random.below(large ? 400 : 30);
  const i64 width = 1 + random.below(large ? 700 : 90), batch = random.below(large ? 90 : 9);
  const i32 threads = 1 + random.below(6);
  const auto x = Strided<float>::random(random, batch, width);
  const auto dy = Strided<float>::random(random, batch, rows);
  const Index index = make_index(random, above + rows, width, 1, rows * width / 4 + 1);
  std::set<i64> taken;
  for (i64 p = 0; p < index.nnz; p++) taken.insert((index.row[p] - above) * width + index.col[p]);
  const float low = 0.1f + std::fabs(random.number()) * std::sqrt(batch + 1.0f);
  const float high = random.chance(30) ? INFINITY : low * (1 + random.below(3));

  const i64 open_room = random.below(rows * width + 2), sure_room = random.below(rows * width + 2);
  Array<i32> counts(random, rows), open(random, open_room);
  Array<i64> sure(random, sure_room), found(random, 2);
  const int status = library.grow_screen(
      x.data, x.batch_stride, x.feature_stride, dy.data, dy.batch_stride, dy.feature_stride, batch,
      rows, width, index.row_ptr.data() + above, index.cols.data(), low, high, counts.data(),
      open.data(), open_room, sure.data(), sure_room, found.data(), threads);
  expect(status == 0 || status == 2, "status");
  if (status) return;
  std::vector<i64> seen;
  i64 n = 0;
  for (i64 r = 0; r < rows; r++)
    for (const i64 end = n + counts[r]; n < end; n++) seen.push_back(r * width + open[n]);
  expect(n == found[0] && std::is_sorted(seen.begin(), seen.end()), "counts of a screen");
  expect(std::is_sorted(sure.data(), sure.data() + found[1]), "the order of what is sure");
  std::set<i64> both(seen.begin(), seen.end()), certain(sure.data(), sure.data() + found[1]);
  both.insert(certain.begin(), certain.end());
  expect(static_cast<i64>(both.size()) == found[0] + found[1], "a position is found once");
  for (i64 i = 0; i < rows * width; i++) {
    double sum = 0;
    for (i64 s = 0; s < batch; s++) sum += double{dy.at(s, i / width)} * x.at(s, i % width);
    const double score = std::fabs(sum);
    if (taken.count(i)) expect(!both.count(i), "what is taken is not found");
    else if (score > low) expect(both.count(i), "a screen leaves nothing out");
    if (certain.count(i)) expect(score > high, "what is sure");
  }
}

void selection_case(const Library& library, Random& random) {
  const i64 count = 1 + random.below(random.chance(10) ? 90000 : 300), k = 1 + random.below(count);
  const i32 threads = 1 + random.below(6);
  Array<float> scores(random, count);
  scores.fill(random);
  Array<i64> flat(random, count), positions(random, k);
  std::iota(flat.data(), flat.data() + count, i64{1} << 33);
  for (const bool largest : {false, true}) {
    std::vector<i64> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) {
      return largest ? scores[a] > scores[b] : scores[a] < scores[b];
    });
    order.resize(k);
    std::sort(order.begin(), order.end());
    expect(library.grow_select(scores.data(), count, k, largest, positions.data(), threads) == 0,
           "status");
    expect(vector_of(positions) == order, "the best scores");

    Array<i32> keys(random, count);
    library.rank_keys(scores.data(), count, largest, keys.data());
    for (i64 i = 1; i < count; i++) {
      const bool above = largest ? scores[i] > scores[0] : scores[i] < scores[0];
      expect((keys[i] > keys[0]) == above && (keys[i] == keys[0]) == (scores[i] == scores[0]),
             "the order of keys");
    }
    for (const i32 shift : {21, 10, 0}) {
      const i32 bits = shift ? 11 : 10;
      Array<i32> counts(random, i64{1} << bits);
      library.rank_digits(keys.data(), count, shift, bits, counts.data());
      expect(std::accumulate(counts.data(), counts.data() + counts.size(), i64{0}) == count,
             "a histogram");
      const auto digit_of = [&](i32 key) {
        return static_cast<i32>((static_cast<uint32_t>(key) ^ 0x80000000u) >> shift &
                                ((1u << bits) - 1));
      };
      const i32 digit = digit_of(keys[random.below(count)]);
      std::vector<i32> alike;
      for (i64 i = 0; i < count; i++)
        if (digit_of(keys[i]) == digit) alike.push_back(keys[i]);
      Array<i32> narrowed(random, alike.size());
      expect(counts[digit] == narrowed.size(), "how many have a digit");
      library.rank_narrow(keys.data(), count, shift, bits, digit, narrowed.data(),
                          narrowed.size());
      expect(vector_of(narrowed) == alike, "the keys with a digit");
    }
    std::vector<uint8_t> bytes(count);
    for (const i64 i : order) bytes[i] = 1;
    const Array<uint8_t> chosen(random, bytes);
    Array<i64> placed(random, k);
    expect(library.rank_places(chosen.data(), count, 7, placed.data()) == k, "how many are set");
    for (i64 i = 0; i < k; i++) expect(placed[i] == order[i] + 7, "where they are set");
    if (!largest) continue;
    const std::vector<float> before = vector_of(scores);
    expect(library.grow_compact(scores.data(), flat.data(), count, k, threads) == 0, "status");
    for (i64 i = 0; i < k; i++)
      expect(scores[i] == before[order[i]] && flat[i] == order[i] + (i64{1} << 33),
             "the best moved to the front");
  }
}

void dropout_case(const Library& library, Random& random) {
  const i64 count = random.below(random.chance(10) ? 100000 : 200);
  Array<float> x(random, count), y(random, count);
  x.fill(random);
  const uint64_t seed = random.engine();
  const i32 threshold = static_cast<i32>(random.engine());
  library.dropout(x.data(), y.data(), count, seed, threshold, 2.0f, 1 + random.below(6));
  for (i64 i = 0; i < count; i++) expect(y[i] == 0 || y[i] == 2 * x[i], "dropout");
  library.dropout(x.data(), x.data(), count, seed, threshold, 2.0f, 1 + random.below(6));
  expect(x == y, "dropout in place");
  library.pattern_large_pages(y.data(), count * sizeof(float));
}
