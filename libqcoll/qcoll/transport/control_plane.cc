#include "qcoll/transport/control_plane.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>

#include "qcoll/base/fork.h"

namespace qcoll::transport {
namespace {

// Strangers cost at most this many descriptors, for at most this long.
constexpr std::size_t kMaxGuests = 256;
constexpr auto kGuestPatience = std::chrono::seconds(10);
// Without descriptors and without guests to show out, the listener rests.
constexpr auto kListenerRest = std::chrono::milliseconds(100);

}  // namespace

std::shared_ptr<ControlPlane> ControlPlane::shared() {
  static std::mutex mutex;
  static std::weak_ptr<ControlPlane> current;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ControlPlane> plane = current.lock();
  // A forked child inherits the object but not its thread.
  if (!plane || plane->owner_pid_ != ::getpid() || plane->failed_.load()) {
    plane.reset(new ControlPlane);
    current = plane;
  }
  return plane;
}

ControlPlane::ControlPlane()
    : owner_pid_(::getpid()), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const char* interfaces = std::getenv("QCOLL_SOCKET_IFNAME");
  const bool chosen = interfaces != nullptr && *interfaces != '\0';
  addresses_ = local_addresses(chosen ? interfaces : "");
  listener_ = listen_on(chosen ? &addresses_.front() : nullptr);
  if (chosen) addresses_.resize(1);
  hide_from_children(listener_.fd.get());
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "qcoll_control");
    run();
  });
}

ControlPlane::~ControlPlane() {
  if (owner_pid_ != ::getpid()) {
    thread_.detach();  // it does not exist in this process
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
  forget(listener_.fd.get());
}

void ControlPlane::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

void ControlPlane::add(std::shared_ptr<GroupLinks> group) {
  {
    const std::lock_guard lock(mutex_);
    groups_[{group->group(), group->rank()}] = std::move(group);
  }
  wake();
}

void ControlPlane::remove(const GroupLinks& group) {
  {
    const std::lock_guard lock(mutex_);
    groups_.erase({group.group(), group.rank()});
  }
  wake();
}

std::vector<std::shared_ptr<GroupLinks>> ControlPlane::groups() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<GroupLinks>> all;
  for (const auto& [key, group] : groups_) all.push_back(group);
  return all;
}

std::shared_ptr<GroupLinks> ControlPlane::find(const Hello& hello) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find({hello.group, hello.to});
  return found == groups_.end() ? nullptr : found->second;
}

void ControlPlane::run() {
  try {
    serve();
  } catch (const std::exception& error) {
    failed_.store(true);
    for (const auto& group : groups())
      group->abort(TransportError("the control thread of rank " + std::to_string(group->rank()) +
                                      " failed: " + error.what(),
                                  group->rank()));
  }
}

void ControlPlane::serve() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    const bool resting = Clock::now() < accept_again_;
    const short listen_for = resting ? 0 : POLLIN;
    std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}, {listener_.fd.get(), listen_for, 0}};
    for (const Guest& guest : guests_) entries.push_back({guest.fd.get(), POLLIN, 0});
    const std::size_t first_link = entries.size();
    const auto members = groups();
    std::vector<std::size_t> ends;
    for (const auto& group : members) {
      group->append_poll_entries(entries);
      ends.push_back(entries.size());
    }
    // With guests, wake now and then to show out those that stay silent.
    ::poll(entries.data(), entries.size(), resting ? 100 : guests_.empty() ? -1 : 1000);

    if (entries[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof(count));
    }
    for (std::size_t i = guests_.size(); i-- > 0;) {
      const bool heard = entries[2 + i].revents != 0;
      if ((heard && !hear(guests_[i])) || Clock::now() > guests_[i].until)
        guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (entries[1].revents != 0) accept_guests();
    std::size_t entry = first_link;
    for (std::size_t g = 0; g < members.size(); ++g)
      for (; entry < ends[g]; ++entry)
        if (entries[entry].revents != 0)
          members[g]->handle_events(entries[entry].fd, entries[entry].revents);
  }
}

void ControlPlane::accept_guests() {
  for (;;) {
    Fd fd(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // No descriptors or no memory. The caller stays in the listener's queue, which stays
      // readable.
      if (make_room()) continue;
      accept_again_ = Clock::now() + kListenerRest;
      return;
    }
    if (guests_.size() >= kMaxGuests) make_room();
    set_low_latency(fd.get());
    Guest guest;
    guest.fd = std::move(fd);
    guest.until = Clock::now() + kGuestPatience;
    // Its hello has usually come: a peer of the group is known at once, however many strangers
    // wait.
    if (hear(guest)) guests_.push_back(std::move(guest));
  }
}

// The one that has waited longest without a valid hello, or else the one that has waited longest.
bool ControlPlane::make_room() {
  const auto leave = [&](std::size_t i) {
    guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
  };
  for (std::size_t i = 0; i < guests_.size(); ++i) {
    if (guests_[i].hello) continue;
    const bool stays = hear(guests_[i]);  // a last time
    if (stays && guests_[i].hello) continue;
    leave(i);
    return true;
  }
  if (guests_.empty()) return false;
  leave(0);
  return true;
}

bool ControlPlane::hear(Guest& guest) {
  for (;;) {
    const std::size_t wanted = guest.hello ? Hello::kBytes + kProofBytes : Hello::kBytes;
    std::byte buffer[Hello::kBytes + kProofBytes];
    const ssize_t got =
        ::recv(guest.fd.get(), buffer, wanted - guest.received.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) return false;
    guest.received.insert(guest.received.end(), buffer, buffer + got);
    if (guest.received.size() < wanted) continue;
    if (guest.hello) {
      admit(guest);
      return false;
    }
    if (!challenge(guest)) return false;
  }
}

bool ControlPlane::challenge(Guest& guest) {
  guest.hello = parse_hello(guest.received);
  if (!guest.hello) return false;
  const auto group = find(*guest.hello);
  if (!group) return false;
  wire::fill_random(guest.nonce);
  const wire::Mac mac = listener_mac(group->secret(), guest.received, guest.nonce);
  std::vector<std::byte> message(guest.nonce.begin(), guest.nonce.end());
  message.insert(message.end(), mac.begin(), mac.end());
  // A fresh connection takes 48 bytes at once, or it is not worth keeping.
  return ::send(guest.fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(message.size());
}

void ControlPlane::admit(Guest& guest) {
  const auto group = find(*guest.hello);
  if (!group) return;
  const ConstBytes received(guest.received);
  const wire::Mac expected =
      dialler_mac(group->secret(), received.first(Hello::kBytes), guest.nonce);
  if (wire::equal_in_constant_time(received.subspan(Hello::kBytes), expected))
    group->adopt(guest.hello->purpose, guest.hello->from, std::move(guest.fd));
}

}  // namespace qcoll::transport
