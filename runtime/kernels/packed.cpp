// Products with weights as they lie on the wire, on a processor.
//
// A weight is read once, as packed bytes. For a few rows of inputs a decoded value lives in a register alone; for many,
// each thread decodes blocks of rows into memory of its own, which its cache keeps, and multiplies them by the sgemm
// that it is given. Threads meet once, at the end: one that is held up by another program holds up no other.
// The values are those of gascompile/formats/ops.py, bit for bit; sums run in another order. Threads are those of the
// OpenMP runtime that torch has loaded: this library names none, so that there is one pool of them.

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Numbers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int8_t Signed __attribute__((vector_size(kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class Vector, class Element>
Vector load(const Element* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(Vector));
  return found;
}

// In two steps: compilers widen fourfold element by element.
template <class Narrow>
Numbers widened(Narrow bytes) {
  return __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Numbers);
}

Floats to_floats(Words bits) {
  Floats found;
  std::memcpy(&found, &bits, sizeof(Floats));
  return found;
}

float sum(Floats lanes) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

float of_bfloat16(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

float of_float16(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  // Exact. Subnormals go by integers: where the processor takes those of float32 for zeros, these are none.
  const uint32_t size = half & 0x7fff;
  float found = static_cast<float>(size) * 0x1p-24f;
  if (size >= 0x400) {
    // Infinities and what is no number have the largest exponent in both.
    const uint32_t bits = (size << 13) + ((size >= 0x7c00 ? 255 - 31 : 127 - 15) << 23);
    std::memcpy(&found, &bits, 4);
  }
  return half & 0x8000 ? -found : found;
}

// What a packed row is made of; offsets in bytes. The twin of gascompile/formats/layout.py. The minima of int4 lie where
// other forms have their steps.
struct Layout {
  int64_t columns, low_bits, low_bytes, group, scales_offset, steps_offset;
};
constexpr int kGroupsPerStep = 16;

float scale_of(const uint8_t* row, const Layout& of, int64_t number) {
  const int code = (row[of.scales_offset + number / 2] >> (number % 2 * 4)) & 15;
  return code * of_bfloat16(row + of.steps_offset + number / kGroupsPerStep * 2);
}

// Writes the scales of the groups of one step, and no others' where the row has fewer.
void scales_of(const uint8_t* row, const Layout& of, int64_t step, float* scales) {
  const uint8_t* codes = row + of.scales_offset + step * (kGroupsPerStep / 2);
  const float size = of_bfloat16(row + of.steps_offset + step * 2);
  const int64_t left = (of.columns - 1) / of.group / 2 + 1 - step * (kGroupsPerStep / 2);
  const int64_t pairs = left < kGroupsPerStep / 2 ? left : kGroupsPerStep / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    scales[2 * i] = (codes[i] & 15) * size;
    scales[2 * i + 1] = (codes[i] >> 4) * size;
  }
}

float number_of(const uint8_t* row, const Layout& of, int64_t column) {
  int q = static_cast<int8_t>(row[column]);
  if (of.low_bits) {
    const int low = row[of.columns + column % of.low_bytes] >> (column / of.low_bytes * of.low_bits);
    q = q * (1 << of.low_bits) + (low & ((1 << of.low_bits) - 1));
  }
  return static_cast<float>(q);
}

// Calls `take(column, values)` for whole vectors of a row's values and `rest(column, value)` for what is left.
template <int kLowBits, class Take, class Rest>
void signed_row(const uint8_t* row, const Layout& of, Take take, Rest rest) {
  const int64_t whole = of.columns / kLanes * kLanes, width = of.group * kGroupsPerStep;
  int64_t plane = 0, place = 0;
  for (int64_t begin = 0; begin < whole; begin += width) {
    float scales[kGroupsPerStep];
    scales_of(row, of, begin / width, scales);
    const int64_t end = begin + width < whole ? begin + width : whole;
    const float* scale = scales;
    for (int64_t first = begin; first < end; first += of.group, ++scale) {
      const int64_t last = first + of.group < end ? first + of.group : end;
      for (int64_t column = first; column < last; column += kLanes) {
        Numbers q = widened(load<Signed>(row + column));
        if constexpr (kLowBits > 0) {
          if (place == of.low_bytes) {
            place = 0;
            plane += kLowBits;
          }
          const uint8_t* from = row + of.columns + place;
          const Numbers low = widened(load<Bytes>(from));
          q = (q << kLowBits) | ((low >> static_cast<int>(plane)) & ((1 << kLowBits) - 1));
          place += kLanes;
        }
        take(column, __builtin_convertvector(q, Floats) * *scale);
      }
    }
  }
  for (int64_t column = whole; column < of.columns; ++column)
    rest(column, number_of(row, of, column) * scale_of(row, of, column / of.group));
}

template <int kLowBits>
struct SignedRow {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest rest) const {
    signed_row<kLowBits>(row, of, take, rest);
  }
};

struct Bfloat16Row {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest rest) const {
    const int64_t whole = of.columns / kLanes * kLanes;
    for (int64_t column = 0; column < whole; column += kLanes) {
      const Words bits = __builtin_convertvector(load<Halves>(row + 2 * column), Words);
      take(column, to_floats(bits << 16));
    }
    for (int64_t column = whole; column < of.columns; ++column)
      rest(column, of_bfloat16(row + 2 * column));
  }
};

// Two values a byte. Of each group the even columns come first, then the odd ones.
struct Int4Row {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest) const {
    const int64_t half = of.group / 2;
    const uint8_t* scales = row + of.scales_offset;
    const uint8_t* minima = row + of.steps_offset;
    for (int64_t begin = 0; begin < of.columns; begin += of.group, scales += 2, minima += 2) {
      const float scale = of_float16(scales), minimum = of_float16(minima);
      const uint8_t* from = row + begin / 2;
      for (int64_t i = 0; i < half; i += kLanes) {
        const Numbers both = widened(load<Bytes>(from + i));
        take(begin + i, __builtin_convertvector(both & 15, Floats) * scale + minimum);
        take(begin + half + i, __builtin_convertvector(both >> 4, Floats) * scale + minimum);
      }
    }
  }
};

Floats floats(Numbers numbers) { return __builtin_convertvector(numbers, Floats); }

// Rows of llama.cpp's blocks, which gascompile/formats/blocks.py describes. A scale times a small whole number is exact,
// so every value is rounded once at most, whichever product comes first.
struct Q8_0Row {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest) const {
    for (int64_t column = 0; column < of.columns; column += 32, row += 34) {
      const float scale = of_float16(row);
      for (int i = 0; i < 32; i += kLanes)
        take(column + i, floats(widened(load<Signed>(row + 2 + i))) * scale);
    }
  }
};

struct Q4_0Row {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest) const {
    for (int64_t column = 0; column < of.columns; column += 32, row += 18) {
      const float scale = of_float16(row);
      const Numbers both = widened(load<Bytes>(row + 2));
      take(column, floats((both & 15) - 8) * scale);
      take(column + 16, floats((both >> 4) - 8) * scale);
    }
  }
};

struct Q4_KRow {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest) const {
    for (int64_t column = 0; column < of.columns; column += 256, row += 144) {
      const float d = of_float16(row), dmin = of_float16(row + 2);
      const uint8_t* coded = row + 4;
      float scales[8], minima[8];
      for (int i = 0; i < 4; ++i) {
        scales[i] = d * (coded[i] & 63);
        minima[i] = dmin * (coded[i + 4] & 63);
        scales[i + 4] = d * ((coded[i + 8] & 15) | (coded[i] >> 6 << 4));
        minima[i + 4] = dmin * ((coded[i + 8] >> 4) | (coded[i + 4] >> 6 << 4));
      }
      for (int run = 0; run < 8; run += 2)
        for (int i = 0; i < 32; i += kLanes) {
          const Numbers both = widened(load<Bytes>(row + 16 + run * 16 + i));
          take(column + run * 32 + i, floats(both & 15) * scales[run] - minima[run]);
          take(column + run * 32 + 32 + i, floats(both >> 4) * scales[run + 1] - minima[run + 1]);
        }
    }
  }
};

struct Q6_KRow {
  Layout of;
  template <class Take, class Rest>
  void operator()(const uint8_t* row, Take take, Rest) const {
    for (int64_t column = 0; column < of.columns; column += 256, row += 210) {
      const float d = of_float16(row + 208);
      float scales[16];
      for (int i = 0; i < 16; ++i) scales[i] = d * static_cast<int8_t>(row[192 + i]);
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; i += kLanes) {
          const uint8_t* from = row + half * 64 + i;
          const Numbers first = widened(load<Bytes>(from)), second = widened(load<Bytes>(from + 32));
          const Numbers upper = widened(load<Bytes>(row + 128 + half * 32 + i));
          const float* scale = scales + half * 8 + i / 16;
          const int64_t to = column + half * 128 + i;
          take(to, floats(((first & 15) | ((upper & 3) << 4)) - 32) * scale[0]);
          take(to + 32, floats(((second & 15) | ((upper >> 2 & 3) << 4)) - 32) * scale[2]);
          take(to + 64, floats(((first >> 4) | ((upper >> 4 & 3) << 4)) - 32) * scale[4]);
          take(to + 96, floats(((second >> 4) | ((upper >> 6) << 4)) - 32) * scale[6]);
        }
    }
  }
};

// Calls `call` with the reader of rows of a form; returns 1 where a layout is for none.
template <class Call>
int for_form(int64_t form, const Layout& of, Call call) {
  switch (form) {
    case 16: call(Bfloat16Row{of}); return 0;
    case 4: if (of.group % (2 * kLanes)) return 1; call(Int4Row{of}); return 0;
    case 108: call(Q8_0Row{of}); return 0;
    case 104: call(Q4_0Row{of}); return 0;
    case 204: call(Q4_KRow{of}); return 0;
    case 206: call(Q6_KRow{of}); return 0;
    default: break;
  }
  if (of.group % kLanes || (of.low_bits && of.low_bytes % kLanes)) return 1;
  switch (form) {
    case 8: call(SignedRow<0>{of}); return 0;
    case 9: call(SignedRow<1>{of}); return 0;
    case 10: call(SignedRow<2>{of}); return 0;
    case 12: call(SignedRow<4>{of}); return 0;
    default: return 1;
  }
}

// What is multiplied: x of [rows, columns], the weight of [outputs, ...] bytes, out of [rows, outputs].
struct Task {
  const float* x;
  int64_t rows;
  const uint8_t* weight;
  int64_t outputs, row_stride;
  float* out;
  int64_t out_stride;
};

template <int kRows, class Row>
void few_rows(const Task& task, const Row& read) {
  const int64_t columns = read.of.columns;
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < task.outputs; ++output) {
    Floats lanes[kRows] = {};
    float single[kRows] = {};
    read(
        task.weight + output * task.row_stride,
        [&](int64_t column, Floats values) {
          for (int i = 0; i < kRows; ++i)
            lanes[i] += values * load<Floats>(task.x + i * columns + column);
        },
        [&](int64_t column, float value) {
          for (int i = 0; i < kRows; ++i) single[i] += value * task.x[i * columns + column];
        });
    for (int i = 0; i < kRows; ++i)
      task.out[i * task.out_stride + output] = sum(lanes[i]) + single[i];
  }
}

template <class Row>
void write_row(const uint8_t* row, const Row& read, float* to) {
  read(
      row, [&](int64_t column, Floats values) { std::memcpy(to + column, &values, sizeof(values)); },
      [&](int64_t column, float value) { to[column] = value; });
}

// A weight whose codes, scales and zero points lie apart, of which `rows` rows are written: what
// gascompile/formats/unpack.py does, bit for bit. Scales and zero points are of [groups, rows] where codes follow each
// other along the rows, else of [rows, groups]; no `zeros` are the same one, `middle`, for all.
struct Apart {
  const uint8_t* codes;
  int64_t stride, bits, rows, columns, groups, group;
  const float *zeros, *scales;
  float middle;
  const int32_t* order;
  float* out;
  int64_t out_stride;
  const float* table;
};

int64_t group_of(const Apart& of, int64_t column) {
  return of.order ? of.order[column] : of.group ? column / of.group : 0;
}

// Words of the codes of some columns, one for each row.
void columns_of_words(const Apart& of) {
  const int64_t each = 32 / of.bits, lines = of.columns / each;
  const uint32_t mask = (1u << of.bits) - 1;
#pragma omp parallel for schedule(static)
  for (int64_t line = 0; line < lines; ++line) {
    const auto* words = reinterpret_cast<const uint32_t*>(of.codes + line * of.stride);
    for (int64_t place = 0; place < each; ++place) {
      const int64_t column = line * each + place, number = group_of(of, column) * of.rows;
      const int shift = static_cast<int>(place * of.bits);
      const float *zeros = of.zeros + number, *scales = of.scales + number;
      float* to = of.out + column * of.out_stride;
      for (int64_t row = 0; row < of.rows; ++row) {
        const auto code = static_cast<int32_t>((words[row] >> shift) & mask);
        to[row] = (static_cast<float>(code) - zeros[row]) * scales[row];
      }
    }
  }
}

// Words of eight rows of one column.
void columns_of_eights(const Apart& of) {
  typedef uint32_t Eight __attribute__((vector_size(32)));
  typedef int32_t SignedEight __attribute__((vector_size(32)));
  typedef float FloatEight __attribute__((vector_size(32)));
  const Eight shifts = {0, 16, 4, 20, 8, 24, 12, 28};
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < of.columns; ++column) {
    const auto* words = reinterpret_cast<const uint32_t*>(of.codes + column * of.stride);
    const int64_t number = group_of(of, column) * of.rows;
    float* to = of.out + column * of.out_stride;
    for (int64_t row = 0; row < of.rows; row += 8) {
      const Eight codes = ((Eight{} + words[row / 8]) >> shifts) & 15;
      SignedEight small;
      std::memcpy(&small, &codes, sizeof(small));
      const auto zeros = load<FloatEight>(of.zeros + number + row);
      const auto scales = load<FloatEight>(of.scales + number + row);
      const FloatEight values = (__builtin_convertvector(small, FloatEight) - zeros) * scales;
      std::memcpy(to + row, &values, sizeof(values));
    }
  }
}

// Codes of rows: that of a column, and those of as many as a vector has from an even column on.
struct FourBits {
  float one(const uint8_t* from, int64_t column) const {
    return static_cast<float>((from[column >> 1] >> ((column & 1) << 2)) & 15);
  }
  Floats many(const uint8_t* from, int64_t column) const {
    typedef uint8_t Half __attribute__((vector_size(kLanes / 2)));
    typedef uint16_t Pairs __attribute__((vector_size(kLanes)));
    // Each byte becomes two, the lower four bits first.
    const Pairs both = __builtin_convertvector(load<Half>(from + column / 2), Pairs);
    const Pairs apart = (both & 15) | (both >> 4 << 8);
    return floats(widened(load<Bytes>(reinterpret_cast<const uint8_t*>(&apart))));
  }
};

struct EightBits {
  float one(const uint8_t* from, int64_t column) const { return static_cast<float>(from[column]); }
  Floats many(const uint8_t* from, int64_t column) const {
    return floats(widened(load<Bytes>(from + column)));
  }
};

// A sign, four bits of exponent, three of fraction; all ones are no number.
struct Fp8 {
  const float* table;
  float one(const uint8_t* from, int64_t column) const { return table[from[column]]; }
  Floats many(const uint8_t* from, int64_t column) const {
    const Numbers raw = widened(load<Bytes>(from + column)), size = raw & 127;
    // Below the least exponent by integers: where the processor takes subnormals for zeros, these are none.
    const Floats small = floats(size) * 0x1p-9f;
    Numbers bits;
    std::memcpy(&bits, &small, sizeof(bits));
    const Numbers is_small = size < 8, is_none = size == 127;
    bits = (bits & is_small) | (((size << 20) + (120 << 23)) & ~is_small);
    bits |= ((raw & 128) << 24) | (is_none & 0x7fc00000);
    Words found;
    std::memcpy(&found, &bits, sizeof(found));
    return to_floats(found);
  }
};

template <class Code>
void rows_of_codes(const Apart& of, Code code) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < of.rows; ++row) {
    const uint8_t* from = of.codes + row * of.stride;
    const float* scales = of.scales + row * of.groups;
    const float* zeros = of.zeros ? of.zeros + row * of.groups : nullptr;
    float* to = of.out + row * of.out_stride;
    if (of.order) {
      for (int64_t column = 0; column < of.columns; ++column) {
        const int64_t number = of.order[column];
        const float zero = zeros ? zeros[number] : of.middle;
        to[column] = (code.one(from, column) - zero) * scales[number];
      }
      continue;
    }
    const int64_t width = of.group ? of.group : of.columns;
    for (int64_t begin = 0, number = 0; begin < of.columns; begin += width, ++number) {
      const int64_t end = begin + width < of.columns ? begin + width : of.columns;
      const float zero = zeros ? zeros[number] : of.middle, scale = scales[number];
      int64_t column = begin;
      for (; begin % 2 == 0 && column + kLanes <= end; column += kLanes) {
        const Floats values = (code.many(from, column) - zero) * scale;
        std::memcpy(to + column, &values, sizeof(values));
      }
      for (; column < end; ++column) to[column] = (code.one(from, column) - zero) * scale;
    }
  }
}

}  // namespace

extern "C" {

// Returns 1 where a kind is not known, or a column is of a group that is not there.
int gas_unpack(int64_t kind, const Apart* of) {
  for (int64_t column = 0; of->order && column < of->columns; ++column)
    if (of->order[column] < 0 || of->order[column] >= of->groups) return 1;
  switch (kind) {
    case 1: columns_of_words(*of); return 0;
    case 2: columns_of_eights(*of); return 0;
    case 3: rows_of_codes(*of, FourBits{}); return 0;
    case 4: rows_of_codes(*of, EightBits{}); return 0;
    case 5: rows_of_codes(*of, Fp8{of->table}); return 0;
    default: return 1;
  }
}

int omp_get_thread_num();

typedef void Sgemm(const char*, const char*, const int*, const int*, const int*, const float*,
                   const float*, const int*, const float*, const int*, const float*, float*,
                   const int*);

// Both return 0 where they have done their work, 1 where the layout or the number of rows is not for them.

int gas_few_rows(int64_t form, const Layout* layout, const Task* task) {
  if (task->rows < 1 || task->rows > 4) return 1;
  return for_form(form, *layout, [&](const auto& read) {
    switch (task->rows) {
      case 1: return few_rows<1>(*task, read);
      case 2: return few_rows<2>(*task, read);
      case 3: return few_rows<3>(*task, read);
      case 4: return few_rows<4>(*task, read);
    }
  });
}

// `scratch` has room for `block_rows` rows of values per thread. Fortran counts columns first: what it is asked for is
// the transposed product.
int gas_many_rows(int64_t form, const Layout* layout, const Task* task, float* scratch,
                  int64_t block_rows, int64_t num_threads, Sgemm* sgemm) {
  const int64_t columns = layout->columns, num_blocks = (task->outputs + block_rows - 1) / block_rows;
  const int width = static_cast<int>(columns), rows = static_cast<int>(task->rows);
  // Of a single row nothing follows.
  const int64_t stride = task->out_stride < task->outputs ? task->outputs : task->out_stride;
  const int out_stride = static_cast<int>(stride);
  const float one = 1, zero = 0;
  return for_form(form, *layout, [&](const auto& read) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t number = 0; number < num_blocks; ++number) {
      float* block = scratch + omp_get_thread_num() * block_rows * columns;
      const int64_t begin = number * block_rows, left = task->outputs - begin;
      const int height = static_cast<int>(left < block_rows ? left : block_rows);
      for (int i = 0; i < height; ++i)
        write_row(task->weight + (begin + i) * task->row_stride, read, block + i * columns);
      sgemm("T", "N", &height, &rows, &width, &one, block, &width, task->x, &width, &zero,
            task->out + begin, &out_stride);
    }
  });
}

// The values of rows, [outputs, columns] in float32, into `task->out`.
int gas_decode(int64_t form, const Layout* layout, const Task* task) {
  return for_form(form, *layout, [&](const auto& read) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < task->outputs; ++row)
      write_row(task->weight + row * task->row_stride, read, task->out + row * layout->columns);
  });
}

}  // extern "C"
