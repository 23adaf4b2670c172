#include "qcoll/transport/group_links.h"

#include <poll.h>

#include <algorithm>
#include <thread>

#include "qcoll/base/fork.h"
#include "qcoll/wire/bytes.h"

namespace qcoll::transport {
namespace {

constexpr std::size_t kFrameHeader = 5;         // u32 payload bytes, u8 type
constexpr std::size_t kMaxPayload = 16 * 1024;  // texts are cut to fit
constexpr std::size_t kMaxUnsent = 1 << 20;     // bytes that wait for one peer
constexpr std::size_t kRanksInReport = 8;
constexpr auto kCheckEvery = std::chrono::milliseconds(500);
constexpr auto kRefusalGrace = std::chrono::milliseconds(300);
constexpr auto kAnswerPatience = std::chrono::milliseconds(200);
constexpr auto kReleasePatience = std::chrono::seconds(1);
constexpr std::size_t kReleasesKept = 1000;  // of barriers that this rank has not come to
constexpr int kDialAttempts = 4;
constexpr auto kDialPause = std::chrono::milliseconds(50);  // before the second, then doubled

std::string encode_u64(std::uint64_t value) {
  std::string raw(8, '\0');
  wire::put(reinterpret_cast<std::byte*>(raw.data()), value);
  return raw;
}

std::uint64_t decode_u64(const std::string& raw) {
  return raw.size() < 8 ? 0
                        : wire::get<std::uint64_t>(reinterpret_cast<const std::byte*>(raw.data()));
}

}  // namespace

GroupLinks::GroupLinks(Rank rank, int size, std::uint64_t group, const wire::Secret& secret,
                       std::shared_ptr<OperationLog> log, std::shared_ptr<const Bell> bell,
                       bool encrypt)
    : rank_(rank),
      group_(group),
      secret_(secret),
      log_(std::move(log)),
      bell_(std::move(bell)),
      encrypt_(encrypt),
      links_(size) {}

GroupLinks::~GroupLinks() {
  for (const Link& link : links_)
    if (link.connection) forget(link.connection.fd());
}

Connection GroupLinks::dial(Rank peer, Purpose purpose, const Deadline& deadline) {
  const PeerAddress& target = peers_[peer];
  try {
    // A listener under a flood of strangers may show out a guest that it does not know yet.
    auto pause = kDialPause;
    for (int attempt = 1;; ++attempt, pause *= 2) {
      Fd fd = transport::dial(target.addresses, target.port, deadline, abort_);
      try {
        const wire::Secret key = shake_hands_as_dialler(
            fd.get(), {.purpose = purpose, .group = group_, .from = rank_, .to = peer}, secret_,
            deadline, abort_);
        std::unique_ptr<Tls> tls;
        if (encrypt_) {
          tls = std::make_unique<Tls>(Tls::Role::kDialler, fd.get(), key);
          tls->shake(deadline, abort_);
        }
        return {std::move(fd), peer, std::move(tls)};
      } catch (const ConnectionLost&) {
        if (attempt == kDialAttempts || abort_.raised()) throw;
        std::this_thread::sleep_for(pause);
      }
    }
  } catch (const LocalShortage& error) {
    throw TransportError(peers_[rank_].label + " cannot connect to " + target.label + ": " +
                             error.what() +
                             "; raise its limit of open files (ulimit -n) or its range of ports "
                             "(net.ipv4.ip_local_port_range)",
                         rank_);
  } catch (const TransportError& error) {
    abort_.throw_if_raised();
    throw ConnectionLost(
        peers_[rank_].label + " connecting to " + target.label + ": " + error.what(), peer);
  }
}

void GroupLinks::connect_all(std::vector<PeerAddress> peers, const Deadline& deadline,
                             const std::function<void(Rank)>& check) {
  {
    const std::lock_guard lock(mutex_);
    peers_ = std::move(peers);
  }
  for (Rank peer = 0; peer < rank_; ++peer) {
    try {
      adopt(Purpose::kControl, dial(peer, Purpose::kControl, deadline));
    } catch (const ConnectionLost&) {
      std::this_thread::sleep_for(kRefusalGrace);  // if it has given up, it is saying why
      check(peer);
      throw;
    }
  }
  std::unique_lock lock(mutex_);
  const auto missing = [&] {
    Rank peer = rank_ + 1;
    while (peer < static_cast<Rank>(links_.size()) && links_[peer].opened) ++peer;
    return peer;
  };
  const auto all_here = [&] {
    return missing() == static_cast<Rank>(links_.size()) || abort_.raised();
  };
  while (!arrived_.wait_for(lock, kCheckEvery, all_here)) {
    const Rank peer = missing();
    if (deadline.passed())
      throw TransportError("timed out after " + std::to_string(deadline.timeout_seconds()) +
                               " s: " + peers_[peer].label +
                               " did not open its control link; is it still alive, and can it "
                               "reach this host?",
                           peer);
    lock.unlock();
    for (Rank other = rank_ + 1; other < static_cast<Rank>(links_.size()); ++other) check(other);
    lock.lock();
  }
  abort_.throw_if_raised();
}

Connection GroupLinks::dial_data(Rank peer, const Deadline& deadline) {
  return dial(peer, Purpose::kData, deadline);
}

std::vector<Connection> GroupLinks::take_accepted() {
  if (!any_accepted_.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(mutex_);
  any_accepted_.store(false, std::memory_order_relaxed);
  return std::exchange(accepted_, {});
}

// Peers are told first: whoever wakes here may leave at once, and must not be taken for the cause.
void GroupLinks::abort(const TransportError& cause) {
  if (abort_.raised()) return;
  post_abort(cause);
  abort_.raise(cause);
  arrived_.notify_all();
}

void GroupLinks::post_abort(const TransportError& cause) {
  const std::lock_guard lock(mutex_);
  for (Rank peer = 0; peer < static_cast<Rank>(links_.size()); ++peer)
    post(peer, Message::kAbort,
         encode_u64(static_cast<std::uint64_t>(cause.peer())) + cause.what());
}

void GroupLinks::leave() {
  if (left_.exchange(true)) return;
  // A peer may not have heard of the failure from the rank that found it yet.
  if (abort_.raised()) post_abort(abort_.cause());
  const std::lock_guard lock(mutex_);
  for (Rank peer = 0; peer < static_cast<Rank>(links_.size()); ++peer)
    post(peer, Message::kGoodbye, "");
}

void GroupLinks::probe() {
  const std::lock_guard lock(mutex_);
  for (Rank peer = 0; peer < static_cast<Rank>(links_.size()); ++peer)
    post(peer, Message::kQuestion, encode_u64(log_->latest()));
}

void GroupLinks::announce(std::uint64_t sequence, const std::string& text) {
  const std::lock_guard lock(mutex_);
  post((rank_ + 1) % static_cast<Rank>(links_.size()), Message::kAnnouncement,
       encode_u64(sequence) + text);
}

StallReport GroupLinks::stall_report() {
  probe();
  const std::uint64_t sequence = log_->latest();
  if (sequence == 0) return {};
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, kAnswerPatience, [&] {
    return std::all_of(links_.begin(), links_.end(), [&](const Link& link) {
      return !link.connection || link.answered == sequence;
    });
  });
  // By how far they are behind: who waits for the last one, in an earlier call, is not to blame.
  std::vector<std::pair<std::uint64_t, Rank>> behind;
  for (Rank peer = 0; peer < static_cast<Rank>(links_.size()); ++peer) {
    const Link& link = links_[peer];
    const bool silent = link.answered != sequence;
    if (peer != rank_ && (silent || !link.has_called_it))
      behind.emplace_back(silent ? 0 : link.latest + 1, peer);
  }
  std::sort(behind.begin(), behind.end());
  StallReport report;
  if (!behind.empty()) report.late = behind.front().second;
  for (std::size_t i = 0; i < std::min(behind.size(), kRanksInReport); ++i) {
    const auto [position, peer] = behind[i];
    report.text += (i ? "; " : "") + peers_[peer].label +
                   (position == 0 ? " does not answer (is it stopped?)"
                                  : " has not made this call: it is " + links_[peer].state);
  }
  if (report.text.empty()) report.text = "every rank has made this call";
  return report;
}

// In slices: an abort does not take the mutex, so that its notice may fall between look and sleep.
bool GroupLinks::wait_for_news(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                               const std::function<bool()>& come) {
  while (!come() && !abort_.raised() && Clock::now() < until)
    arrived_.wait_until(lock, std::min(until, Clock::now() + kCheckEvery));
  return come();
}

std::vector<Rank> GroupLinks::monitored_barrier(const Deadline& deadline) {
  const std::lock_guard one(barrier_mutex_);
  std::unique_lock lock(mutex_);
  const std::uint64_t number = ++barriers_;
  if (rank_ == 0) {
    const auto all_came = [&] {
      return std::all_of(links_.begin() + 1, links_.end(),
                         [&](const Link& link) { return link.arrived >= number; });
    };
    wait_for_news(lock, deadline.at(), all_came);
    abort_.throw_if_raised();
    std::vector<Rank> absent;
    std::string payload = encode_u64(number);
    for (Rank peer = 1; peer < static_cast<Rank>(links_.size()); ++peer)
      if (links_[peer].arrived < number) {
        absent.push_back(peer);
        payload += encode_u64(static_cast<std::uint64_t>(peer));
      }
    for (Rank peer = 1; peer < static_cast<Rank>(links_.size()); ++peer)
      post(peer, Message::kRelease, payload);
    return absent;
  }
  post(0, Message::kArrival, encode_u64(number));
  // Rank 0 may have begun to wait later than this rank.
  const bool heard = wait_for_news(lock, deadline.at() + kReleasePatience,
                                   [&] { return released_.contains(number); });
  abort_.throw_if_raised();
  std::erase_if(released_, [&](const auto& entry) { return entry.first < number; });
  return heard ? released_.at(number) : std::vector<Rank>{0};
}

void GroupLinks::handle_release(const std::string& payload) {
  std::vector<Rank> absent;
  for (std::size_t at = 8; at + 8 <= payload.size(); at += 8)
    absent.push_back(static_cast<Rank>(decode_u64(payload.substr(at, 8))));
  {
    const std::lock_guard lock(mutex_);
    if (released_.size() < kReleasesKept) released_[decode_u64(payload)] = std::move(absent);
  }
  arrived_.notify_all();
}

bool GroupLinks::adopt(Purpose purpose, Connection connection) {
  const Rank from = connection.peer();
  const std::lock_guard lock(mutex_);
  if (from < 0 || from >= static_cast<Rank>(links_.size()) || from == rank_) return false;
  if (purpose == Purpose::kData) {
    std::erase_if(accepted_, [&](const auto& earlier) { return earlier.peer() == from; });
    accepted_.push_back(std::move(connection));
    any_accepted_.store(true, std::memory_order_release);
    bell_->ring();
    return true;
  }
  if (links_[from].opened) return false;
  links_[from].connection = std::move(connection);
  links_[from].opened = true;
  hide_from_children(links_[from].connection.fd());
  arrived_.notify_all();
  return true;
}

void GroupLinks::append_poll_entries(std::vector<pollfd>& entries) const {
  const std::lock_guard lock(mutex_);
  for (const Link& link : links_)
    if (link.connection)
      entries.push_back({link.connection.fd(),
                         static_cast<short>(POLLIN | (link.unsent.empty() ? 0 : POLLOUT)), 0});
}

void GroupLinks::handle_events(int fd, short events) {
  Rank peer = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(links_.begin(), links_.end(),
                                    [&](const Link& link) { return link.connection.fd() == fd; });
    if (found == links_.end()) return;
    peer = static_cast<Rank>(found - links_.begin());
    if ((events & POLLOUT) != 0) flush(*found);
  }
  if ((events & ~POLLOUT) != 0) read_link(peer);
}

void GroupLinks::post(Rank peer, Message type, const std::string& payload) {
  Link& link = links_[peer];
  if (!link.connection) return;
  // A peer that is stopped, or does not read: questions and answers can be lost, news cannot.
  const bool news = type == Message::kAbort || type == Message::kGoodbye;
  if (!news && link.unsent.size() > kMaxUnsent) return;
  const std::size_t bytes = std::min(payload.size(), kMaxPayload);
  std::byte frame[kFrameHeader];
  wire::put(frame, static_cast<std::uint32_t>(bytes));
  wire::put(frame + 4, static_cast<std::uint8_t>(type));
  link.unsent.insert(link.unsent.end(), frame, frame + kFrameHeader);
  const auto* text = reinterpret_cast<const std::byte*>(payload.data());
  link.unsent.insert(link.unsent.end(), text, text + bytes);
  flush(link);
}

// What the kernel does not take now, the control thread sends when it can. Errors are left to the
// reading side, which sees the same end.
void GroupLinks::flush(Link& link) {
  try {
    while (!link.unsent.empty()) {
      const std::size_t sent = link.connection.send(link.unsent);
      if (sent == 0) return;
      link.unsent.erase(link.unsent.begin(),
                        link.unsent.begin() + static_cast<std::ptrdiff_t>(sent));
    }
  } catch (const ConnectionLost&) {
    link.unsent.clear();
  }
}

// Only the control thread reads and closes links, but others send on them meanwhile.
std::size_t GroupLinks::receive_some(Rank peer, Bytes into, std::string& ended) {
  const std::lock_guard lock(mutex_);
  if (!links_[peer].connection) return 0;
  try {
    if (const auto got = links_[peer].connection.receive(into)) return *got;
    ended = "closed";
  } catch (const ConnectionLost& error) {
    ended = error.what();
  }
  return 0;
}

void GroupLinks::read_link(Rank peer) {
  Link& link = links_[peer];
  std::byte buffer[4096];
  for (;;) {
    std::string ended;
    const std::size_t got = receive_some(peer, buffer, ended);
    if (!ended.empty()) return link_ended(peer, ended);
    if (got == 0) break;
    link.received.insert(link.received.end(), buffer, buffer + got);
    while (link.received.size() >= kFrameHeader) {
      const auto bytes = wire::get<std::uint32_t>(link.received.data());
      if (bytes > kMaxPayload) return link_ended(peer, "garbage on the link");
      if (link.received.size() < kFrameHeader + bytes) break;
      const auto type = static_cast<Message>(wire::get<std::uint8_t>(link.received.data() + 4));
      const std::string payload(reinterpret_cast<const char*>(link.received.data()) + kFrameHeader,
                                bytes);
      link.received.erase(link.received.begin(), link.received.begin() + kFrameHeader + bytes);
      handle_message(peer, type, payload);
    }
  }
}

void GroupLinks::handle_message(Rank peer, Message type, const std::string& payload) {
  switch (type) {
    case Message::kGoodbye:
      links_[peer].departed.store(true, std::memory_order_release);
      bell_->ring();
      break;
    case Message::kAbort:
      abort_.raise(TransportError(payload.substr(std::min<std::size_t>(payload.size(), 8)),
                                  static_cast<Rank>(decode_u64(payload))));
      arrived_.notify_all();
      break;
    case Message::kQuestion: {
      const std::uint64_t sequence = decode_u64(payload);
      const std::string text = log_->text_of(sequence).value_or("");
      const std::lock_guard lock(mutex_);
      post(peer, Message::kAnswer,
           encode_u64(sequence) + encode_u64(log_->latest()) + text + '\0' + log_->state());
      break;
    }
    case Message::kAnswer:
      handle_answer(peer, payload);
      break;
    case Message::kAnnouncement:
      if (payload.size() >= 8) compare(peer, decode_u64(payload), payload.substr(8));
      break;
    case Message::kArrival: {
      {
        const std::lock_guard lock(mutex_);
        links_[peer].arrived = decode_u64(payload);
      }
      arrived_.notify_all();
      break;
    }
    case Message::kRelease:
      if (peer == 0) handle_release(payload);
      break;
  }
}

void GroupLinks::handle_answer(Rank peer, const std::string& payload) {
  const std::uint64_t sequence = decode_u64(payload);
  const std::size_t separator = payload.find('\0', 16);
  if (separator == std::string::npos) return;
  const std::string theirs = payload.substr(16, separator - 16);
  {
    const std::lock_guard lock(mutex_);
    links_[peer].answered = sequence;
    links_[peer].latest = decode_u64(payload.substr(8, 8));
    links_[peer].has_called_it = !theirs.empty();
    links_[peer].state = payload.substr(separator + 1);
  }
  arrived_.notify_all();
  if (!theirs.empty()) compare(peer, sequence, theirs);
}

// A rank that is merely late has no text for the number yet; the log then compares when it has.
void GroupLinks::compare(Rank peer, std::uint64_t sequence, const std::string& theirs) {
  if (const auto conflict = log_->compare(sequence, peer, theirs))
    abort(conflict_error(rank_, *conflict));
}

void GroupLinks::link_ended(Rank peer, const std::string& why) {
  const bool orderly = departed(peer) || left();
  std::string label;
  {
    const std::lock_guard lock(mutex_);
    forget(links_[peer].connection.fd());
    links_[peer].connection = {};
    label = peers_.empty() ? "rank " + std::to_string(peer) : peers_[peer].label;
  }
  if (!orderly) abort(TransportError(label + " died (its control link ended: " + why + ")", peer));
}

}  // namespace qcoll::transport
