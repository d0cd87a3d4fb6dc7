/* {"op": "native_layer_norm", "sizes": [2, 8, 32, 32], "normalized": 3, "scalars": {"eps": 1e-5}, "reason": null,
    "workspaces": [{"name": "parts", "size_bytes": 512}],
    "steps": [{"entry": "partial", "range": 32, "grain": 1, "args": ["x", "parts"]},
              {"entry": "finish", "range": 2, "grain": 1, "args": ["parts", "mean", "rstd"]},
              {"entry": "apply", "range": 32, "grain": 1, "args": ["x", "weight", "bias", "y", "parts"]}],
    "idea": "few long rows: each is cut into 16 pieces that any thread may take; moments are combined as Chan, Golub and LeVeque do"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t ROW = 8192, PIECES = 16, PIECE = ROW / PIECES;

extern "C" void partial(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  double* parts = static_cast<double*>(pointers[1]);
  for (int64_t piece = begin; piece < end; ++piece) {
    const float* in = x + piece * PIECE;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < PIECE; ++i) sum += in[i];
    const double mean = sum / PIECE;
    for (int64_t i = 0; i < PIECE; ++i) squares += (in[i] - mean) * (in[i] - mean);
    parts[2 * piece] = mean;
    parts[2 * piece + 1] = squares;
  }
}

// Leaves mean and rstd of row r in the first piece of that row.
extern "C" void finish(int64_t begin, int64_t end, void* const* pointers) {
  double* parts = static_cast<double*>(pointers[0]);
  for (int64_t row = begin; row < end; ++row) {
    double* own = parts + 2 * PIECES * row;
    double mean = 0, squares = 0;
    for (int64_t p = 0; p < PIECES; ++p) {
      const double delta = own[2 * p] - mean;
      squares += own[2 * p + 1] + delta * delta * PIECE * p / (p + 1);
      mean += delta / (p + 1);
    }
    own[0] = mean;
    own[1] = 1 / std::sqrt(squares / ROW + 1e-5);
    static_cast<float*>(pointers[1])[row] = static_cast<float>(own[0]);
    static_cast<float*>(pointers[2])[row] = static_cast<float>(own[1]);
  }
}

extern "C" void apply(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  float* y = static_cast<float*>(pointers[3]);
  const double* parts = static_cast<const double*>(pointers[4]);
  for (int64_t piece = begin; piece < end; ++piece) {
    const double mean = parts[2 * PIECES * (piece / PIECES)], rstd = parts[2 * PIECES * (piece / PIECES) + 1];
    const int64_t column = piece % PIECES * PIECE;
    for (int64_t i = 0; i < PIECE; ++i) {
      const double normalised = (x[piece * PIECE + i] - mean) * rstd;
      y[piece * PIECE + i] = static_cast<float>(normalised * weight[column + i] + bias[column + i]);
    }
  }
}
