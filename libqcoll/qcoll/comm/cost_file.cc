// How a cost model is read. The text may be anybody's.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "qcoll/base/error.h"
#include "qcoll/base/fd.h"
#include "qcoll/comm/cost_model.h"

namespace qcoll::comm {
namespace {

constexpr std::string_view kFirstLine = "qcoll-tuning 1";
constexpr std::string_view kBlanks = " \t";
constexpr std::uint64_t kMaxPointBytes = std::uint64_t{1} << 50;
constexpr double kMaxMicroseconds = 1e12;
constexpr std::size_t kMaxRanks = 1 << 20;

constexpr std::size_t kLongestQuote = 60;

bool is_plain(char c) { return c >= ' ' && c <= '~'; }

// Short enough for a message, and nothing in it that a terminal would obey.
std::string quoted(std::string_view text) {
  std::string safe = "\"";
  for (const char c : text.substr(0, kLongestQuote)) {
    char escaped[5];
    std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned char>(c));
    if (is_plain(c))
      safe += c;
    else
      safe += escaped;
  }
  return safe + (text.size() > kLongestQuote ? "...\"" : "\"");
}

class Line {
 public:
  Line(std::size_t number, std::string_view text) : number_(number), rest_(text) {}

  [[noreturn]] void reject(const std::string& wrong, const std::string& expected) const {
    throw UsageError("line " + std::to_string(number_) + ": " + wrong + "; expected " + expected);
  }

  // The next word; empty at the end.
  std::string_view word() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(kBlanks), rest_.size()));
    const std::string_view found = rest_.substr(0, rest_.find_first_of(kBlanks));
    rest_.remove_prefix(found.size());
    return found;
  }

 private:
  const std::size_t number_;
  std::string_view rest_;
};

template <class T>
std::optional<T> number_in(std::string_view text, T low, T high) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if (!(value >= low && value <= high)) return std::nullopt;  // nor NaN
  return value;
}

std::optional<std::vector<std::size_t>> numbers(std::string_view text, char separator,
                                                std::size_t least) {
  std::vector<std::size_t> found;
  for (bool more = true; more;) {
    const std::size_t at = text.find(separator);
    const auto number = number_in<std::size_t>(text.substr(0, at), least, kMaxRanks);
    if (!number) return std::nullopt;
    found.push_back(*number);
    more = at != std::string_view::npos;
    if (more) text.remove_prefix(at + 1);
  }
  return found;
}

// As layout_of writes it.
std::string layout_from(std::string_view text, const Line& line) {
  const auto reject = [&] {
    line.reject(quoted(text) + " is not a layout",
                "the ranks of each node, like 2+2, and for racks the sizes of the levels, like "
                "2+2+2+2/2x2");
  };
  const std::size_t slash = text.find('/');
  auto sizes = numbers(text.substr(0, slash), '+', 1);
  if (!sizes) reject();
  std::sort(sizes->begin(), sizes->end(), std::greater<>());
  std::string layout;
  for (const std::size_t size : *sizes)
    layout += (layout.empty() ? "" : "+") + std::to_string(size);
  if (slash == std::string_view::npos) return layout;
  const auto levels = numbers(text.substr(slash + 1), 'x', 2);
  if (!levels || levels->size() < 2 || sizes->front() != sizes->back()) reject();
  std::size_t nodes = 1;
  for (const std::size_t level : *levels)
    if ((nodes *= level) > sizes->size()) reject();
  if (nodes != sizes->size()) reject();
  for (std::size_t i = 0; i < levels->size(); ++i)
    layout += (i == 0 ? "/" : "x") + std::to_string((*levels)[i]);
  return layout;
}

wire::Collective collective_from(std::string_view text, const Line& line) {
  // Splits of an all-to-all differ between ranks, so that no size of it could decide.
  for (const auto collective : {wire::Collective::kAllGather, wire::Collective::kReduceScatter,
                                wire::Collective::kAllReduce})
    if (text == wire::name_of(collective)) return collective;
  line.reject(quoted(text) + " is not a collective that is chosen by time",
              "all_gather, reduce_scatter or all_reduce");
}

CodecList codecs_from(std::string_view text, const Line& line) {
  // Before the parser quotes it in full; the longest that means anything has one codec for each of
  // a few levels.
  if (text.size() > kLongestQuote || !std::all_of(text.begin(), text.end(), is_plain))
    line.reject(quoted(text) + " is not a list of codecs",
                "codecs like exact or int8:256/int4:128");
  try {
    return parse_codec_list("codecs", text);
  } catch (const UsageError& error) {
    line.reject(error.what(), "codecs like exact or int8:256/int4:128");
  }
}

std::vector<LayoutCosts::Point> points_from(Line& line) {
  std::vector<LayoutCosts::Point> points;
  for (std::string_view word = line.word(); !word.empty(); word = line.word()) {
    const std::size_t colon = std::min(word.find(':'), word.size());
    const auto bytes = number_in<std::uint64_t>(word.substr(0, colon), 1, kMaxPointBytes);
    const auto micros =
        number_in<double>(word.substr(std::min(colon + 1, word.size())), 1e-6, kMaxMicroseconds);
    if (!bytes || !micros)
      line.reject(quoted(word) + " is not a point",
                  "BYTES:MICROSECONDS, both above 0, like 65536:120.5");
    if (!points.empty() && points.back().bytes >= *bytes)
      line.reject(std::to_string(*bytes) + " bytes follow " + std::to_string(points.back().bytes),
                  "points in increasing order of bytes");
    points.push_back({*bytes, *micros * 1e-6});
  }
  if (points.empty())
    line.reject("the series has no points", "BYTES:MICROSECONDS after the codecs");
  return points;
}

std::string fingerprint_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

std::string contents_of(const std::string& path) {
  if (path.find('\0') != std::string::npos) throw UsageError("a file's name has no zero byte");
  // Not to wait for the writer of a pipe.
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) throw UsageError(system_error_text("it cannot be opened", errno));
  struct stat status{};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode))
    throw UsageError("it is not a file");
  std::string text(CostModel::kMaxFileBytes + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw UsageError(system_error_text("it cannot be read", errno));
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  text.resize(size);
  return text;
}

}  // namespace

CostModel CostModel::parse(std::string_view text) {
  if (text.size() > kMaxFileBytes)
    throw UsageError("it is larger than " + std::to_string(kMaxFileBytes) + " bytes");
  CostModel model;
  model.fingerprint_ = fingerprint_of(text);
  std::size_t series = 0;
  for (std::size_t number = 1; number == 1 || !text.empty(); ++number) {
    std::string_view content = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(content.size() + 1, text.size()));
    if (content.ends_with('\r')) content.remove_suffix(1);
    Line line(number, content);
    if (number == 1) {
      if (content != kFirstLine) line.reject(quoted(content), quoted(kFirstLine));
      continue;
    }
    const std::string_view first = line.word();
    if (first.empty() || first.front() == '#') continue;
    const std::string layout = layout_from(first, line);
    const wire::Collective collective = collective_from(line.word(), line);
    const std::string_view name = line.word();
    const std::optional<DType> dtype = parse_float_dtype(name);
    if (!dtype) line.reject(quoted(name) + " is not a dtype", "float32, bfloat16 or float16");
    const std::string_view codecs = line.word();
    CodecList list = codecs_from(codecs, line);
    if (++series > kMaxSeries)
      line.reject("a series too many", "at most " + std::to_string(kMaxSeries));
    if (!model.layouts_[layout].add(collective, *dtype, std::move(list), points_from(line)))
      line.reject("another series for " + layout + ", " + std::string(wire::name_of(collective)) +
                      ", " + std::string(name_of(*dtype)) + ", " + quoted(codecs),
                  "one of each");
  }
  return model;
}

std::shared_ptr<const CostModel> CostModel::read(const std::string& path) {
  return std::make_shared<const CostModel>(parse(contents_of(path)));
}

}  // namespace qcoll::comm
