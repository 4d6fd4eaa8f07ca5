// The products of linear_products.h in plain C++. Included there, inside its namespaces.

// Codes already unpacked to Op's element type, less the constant zero point; group sums scaled in float.
template <class Op>
struct Grouped {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      float sums[MR * kLanes];
      std::memset(p.c, 0, sizeof sums);
      for (int g = 0; g < p.groups; ++g) {
        Accumulator<MR> acc;
        acc.zero();
        acc.template run<Op>(p.a + static_cast<size_t>(g) * p.units * 4 * MR, 4 * MR, 4, p.weights + g * p.weight_step,
                             4 * kLanes, p.units);
        acc.store(sums, kLanes);
        float s[kLanes], shift[kLanes];
        for (int n = 0; n < kLanes; ++n) {
          s[n] = scale_at(p.scales + g * p.step, p.scale_format, n);
          shift[n] = p.zeros ? static_cast<float>(p.zeros[g * p.step + n]) - static_cast<float>(p.zero) : 0.0f;
        }
        for (int m = 0; m < MR; ++m) {
          const float total = p.zeros ? p.row_totals[g * MR + m] : 0.0f;
          for (int n = 0; n < kLanes; ++n) p.c[m * kLanes + n] += s[n] * (sums[m * kLanes + n] - shift[n] * total);
        }
      }
    }
  };
};

template <bool kInt4>
struct Integer {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      const int8_t* a = reinterpret_cast<const int8_t*>(p.a);
      for (int g = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        int32_t acc[MR][kLanes];
        std::memset(acc, 0, sizeof acc);
        for (int u = 0; u < p.units; ++u, a += 4 * MR) {
          int32_t codes[4][kLanes];  // by their place in the unit, so that lanes lie side by side
          for (int n = 0; n < kLanes; ++n)
            for (int i = 0; i < 4; ++i) {
              const int32_t byte = w[4 * n + i];
              codes[i][n] = !kInt4 ? byte : (u & 1) ? byte >> 4 : byte & 15;
            }
          for (int m = 0; m < MR; ++m)
            for (int i = 0; i < 4; ++i)
              for (int n = 0; n < kLanes; ++n) acc[m][n] += codes[i][n] * a[4 * m + i];
          if (!kInt4 || (u & 1)) w += 4 * kLanes;
        }
        for (int m = 0; m < MR; ++m)
          for (int n = 0; n < kLanes; ++n) {
            const int zero = p.zeros ? p.zeros[g * p.step + n] : p.zero;
            const int32_t dot = acc[m][n] - zero * p.row_sums[g * MR + m];
            const float scale = scale_at(p.scales + g * p.step, p.scale_format, n) * p.row_scales[g * MR + m];
            p.c[m * kLanes + n] += static_cast<float>(dot) * scale;
          }
      }
    }
  };
};
