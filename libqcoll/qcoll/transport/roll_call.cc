#include "qcoll/transport/roll_call.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "qcoll/base/error.h"
#include "qcoll/wire/bytes.h"

namespace qcoll::transport {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  char buffer[PATH_MAX];
  const ssize_t length = ::readlink(path, buffer, sizeof(buffer));
  return length < 0 ? "" : std::string(buffer, static_cast<std::size_t>(length));
}

std::string host_name() {
  char buffer[HOST_NAME_MAX + 1] = {};
  ::gethostname(buffer, HOST_NAME_MAX);
  return buffer;
}

// "key=value<separator>..." -> map; keys and values are ours and hold no separators.
std::map<std::string, std::string> parse_pairs(const std::string& text, char separator) {
  std::map<std::string, std::string> pairs;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, separator);) {
    const std::size_t begin = item.find_first_not_of(' ');
    const std::size_t equals = item.find('=');
    if (begin != std::string::npos && equals != std::string::npos)
      pairs[item.substr(begin, equals - begin)] = item.substr(equals + 1);
  }
  return pairs;
}

constexpr std::size_t kMaxNodeLabel = 255;  // bytes
constexpr auto kRefusalStands = std::chrono::seconds(1);
constexpr auto kShortestPause = std::chrono::milliseconds(2);
constexpr auto kLongestPause = std::chrono::milliseconds(250);
const std::string kSecretKey = "qcoll/secret";
const std::string kRefusal = "refusal=";
const std::string kUsage = "usage ";

void check_refusal(const std::string& record) {
  if (!record.starts_with(kRefusal)) return;
  const std::string reason = record.substr(kRefusal.size());
  const std::string prefix = "another rank cannot join the group: ";
  if (reason.starts_with(kUsage)) throw UsageError(prefix + reason.substr(kUsage.size()));
  throw TransportError(prefix + reason);
}

// What the store says when it has waited in vain becomes an error about the rank.
std::string get_from(Rendezvous& store, const std::string& key, Rank rank,
                     const Deadline& deadline) {
  try {
    return store.get(key, deadline);
  } catch (const TransportError& error) {
    throw TransportError("rank " + std::to_string(rank) + " has not joined the group after " +
                             std::to_string(deadline.elapsed_seconds()) +
                             " s; did it start, and does it reach the rendezvous store? (" +
                             error.what() + ")",
                         rank);
  }
}

// A whole number in [low, high]; throws std::out_of_range or std::invalid_argument.
int number_from(const std::string& text, int low, int high) {
  std::size_t used = 0;
  const int value = std::stoi(text, &used);
  if (used != text.size() || value < low || value > high) throw std::out_of_range(text);
  return value;
}

std::string hello_key(Rank rank) { return "qcoll/hello/" + std::to_string(rank); }
// Where `rank` writes that it cannot join.
std::string refusal_key(Rank rank) { return rank == 0 ? kSecretKey : hello_key(rank); }

// Refusals that were seen. One that is left over from an earlier group is soon overwritten, so
// only one that stands is thrown.
class Refusals {
 public:
  // False when `value` is a refusal, which does not count yet.
  bool passes(Rank rank, const std::string& value) {
    if (!value.starts_with(kRefusal)) return true;
    auto& seen = seen_[rank];
    if (seen.text != value) seen = {value, Clock::now()};
    if (Clock::now() - seen.since >= kRefusalStands) check_refusal(value);
    return false;
  }

 private:
  struct Seen {
    std::string text;
    Clock::time_point since;
  };
  std::map<Rank, Seen> seen_;
};

// The pause between two looks into the store: short at first, for ranks that start together.
class Pause {
 public:
  Clock::duration next(const Deadline& deadline) {
    now_ = std::min<Clock::duration>(now_ * 2, kLongestPause);
    return std::max<Clock::duration>(std::min<Clock::duration>(now_, deadline.at() - Clock::now()),
                                     kShortestPause);
  }

 private:
  Clock::duration now_ = kShortestPause;
};

std::string serialize(const GroupSecret& secret) {
  std::string raw(8, '\0');
  wire::put(reinterpret_cast<std::byte*>(raw.data()), secret.group);
  raw.append(reinterpret_cast<const char*>(secret.secret.data()), secret.secret.size());
  for (const wire::Nonce& token : secret.tokens)
    raw.append(reinterpret_cast<const char*>(token.data()), token.size());
  return raw;
}

// Nothing when it is the secret of a group of another size.
std::optional<GroupSecret> parse_secret(const std::string& raw, int size) {
  GroupSecret secret;
  const std::size_t tokens_at = 8 + secret.secret.size();
  if (raw.size() != tokens_at + static_cast<std::size_t>(size) * wire::kNonceBytes)
    return std::nullopt;
  const auto* data = reinterpret_cast<const std::byte*>(raw.data());
  secret.group = wire::get<std::uint64_t>(data);
  std::copy(data + 8, data + tokens_at, secret.secret.begin());
  secret.tokens.resize(size);
  for (int r = 0; r < size; ++r)
    std::copy_n(data + tokens_at + r * wire::kNonceBytes, wire::kNonceBytes,
                secret.tokens[r].begin());
  return secret;
}

wire::Nonce token_from(const std::string& raw) {
  wire::Nonce token{};
  if (raw.size() == token.size())
    std::copy_n(reinterpret_cast<const std::byte*>(raw.data()), token.size(), token.begin());
  return token;
}

std::string serialize(const Identity& id) {
  std::ostringstream text;
  text << "rank=" << id.rank << "\nnode=" << id.node << "\nhost=" << id.host
       << "\nboot_id=" << id.boot_id << "\nnet_namespace=" << id.net_namespace
       << "\npid_namespace=" << id.pid_namespace << "\npid=" << id.pid << "\nport=" << id.port
       << "\naddresses=" << id.addresses << "\nagreement=" << id.agreement << "\n";
  return text.str();
}

Identity parse_identity(const std::string& text, Rank expected) {
  auto pairs = parse_pairs(text, '\n');
  Identity id;
  try {
    id.rank = number_from(pairs.at("rank"), expected, expected);
    id.pid = number_from(pairs.at("pid"), 1, INT_MAX);
    id.port = static_cast<std::uint16_t>(number_from(pairs.at("port"), 1, 65535));
    std::stringstream list(pairs["addresses"]);
    for (std::string address; std::getline(list, address, ',');) parse_address(address);
    if (pairs["node"].size() > kMaxNodeLabel) throw std::out_of_range("node");
  } catch (const std::exception&) {
    throw TransportError("the rendezvous store holds a malformed record of rank " +
                             std::to_string(expected) + ": " + text,
                         expected);
  }
  id.node = pairs["node"];
  id.host = pairs["host"];
  id.boot_id = pairs["boot_id"];
  id.net_namespace = pairs["net_namespace"];
  id.pid_namespace = pairs["pid_namespace"];
  id.addresses = pairs["addresses"];
  id.agreement = pairs["agreement"];
  return id;
}

void check_agreement(const std::vector<Identity>& all) {
  const auto expected = parse_pairs(all[0].agreement, ';');
  for (const Identity& id : all) {
    if (id.agreement == all[0].agreement) continue;
    auto theirs = parse_pairs(id.agreement, ';');
    for (const auto& [key, value] : expected)
      if (theirs[key] != value)
        throw UsageError("ranks disagree on " + key + ": " + all[0].label() + " has \"" + value +
                         "\", " + id.label() + " has \"" + theirs[key] +
                         "\"; give all ranks of the group the same options and versions");
    throw UsageError("ranks disagree: " + all[0].label() + " has {" + all[0].agreement + "}, " +
                     id.label() + " has {" + id.agreement + "}");
  }
}

}  // namespace

std::string Identity::label() const {
  return "rank " + std::to_string(rank) + " (" + host + ", pid " + std::to_string(pid) + ")";
}

Identity own_identity(Rank rank, const std::string& node, std::uint16_t port,
                      const std::vector<Address>& addresses, const std::string& agreement) {
  Identity id{.rank = rank,
              .node = node,
              .host = host_name(),
              .boot_id = first_line("/proc/sys/kernel/random/boot_id"),
              .net_namespace = link_target("/proc/self/ns/net"),
              .pid_namespace = link_target("/proc/self/ns/pid"),
              .pid = ::getpid(),
              .port = port,
              .addresses = {},
              .agreement = agreement};
  if (id.node.empty()) id.node = id.host + "#" + id.boot_id.substr(0, 8);
  if (id.node.find_first_of("\n=") != std::string::npos)
    throw UsageError("QCOLL_NODE must not contain line breaks or '='");
  if (id.node.size() > kMaxNodeLabel)
    throw UsageError("QCOLL_NODE has " + std::to_string(id.node.size()) +
                     " bytes, expected at most " + std::to_string(kMaxNodeLabel));
  for (const Address& address : addresses)
    id.addresses += (id.addresses.empty() ? "" : ",") + address.text();
  return id;
}

std::vector<Address> addresses_to_dial(const Identity& me, const Identity& other) {
  const bool same_namespace =
      me.boot_id == other.boot_id && me.net_namespace == other.net_namespace;
  std::vector<Address> preferred;
  std::vector<Address> others;
  std::stringstream list(other.addresses);
  for (std::string text; std::getline(list, text, ',');) {
    const Address address = parse_address(text);
    if (address.loopback() && !same_namespace) continue;
    (address.loopback() ? preferred : others).push_back(address);
  }
  preferred.insert(preferred.end(), others.begin(), others.end());
  return preferred;
}

bool may_share_memory(const Identity& a, const Identity& b) {
  return a.boot_id == b.boot_id && a.pid_namespace == b.pid_namespace;
}

void check_alive(const Identity& me, const Identity& other) {
  if (!may_share_memory(me, other)) return;
  bool ended = ::kill(other.pid, 0) != 0 && errno == ESRCH;
  if (!ended) {  // but its parent may not have waited for it yet
    std::ifstream file("/proc/" + std::to_string(other.pid) + "/stat");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const std::size_t name_end = text.rfind(") ");
    ended = name_end != std::string::npos && text[name_end + 2] == 'Z';
  }
  if (ended) throw TransportError(other.label() + " died while the group formed", other.rank);
}

std::string group_key(std::uint64_t group, const std::string& what, Rank rank) {
  std::ostringstream key;
  key << "qcoll/" << std::hex << group << std::dec << '/' << what << '/' << rank;
  return key.str();
}

GroupSecret share_secret(Rendezvous& store, Rank rank, int size, const Deadline& deadline) {
  if (rank == 0) {
    GroupSecret secret;
    std::array<std::byte, 8> group;
    wire::fill_random(group);
    secret.group = wire::get<std::uint64_t>(group.data());
    wire::fill_random(secret.secret);
    secret.tokens.resize(size);
    store.set(kSecretKey, serialize(secret));
    return secret;
  }
  wire::Nonce token;
  wire::fill_random(token);
  store.set(hello_key(rank),
            std::string(reinterpret_cast<const char*>(token.data()), token.size()));
  Refusals refusals;
  Pause pause;
  for (;;) {
    const std::string raw = get_from(store, kSecretKey, 0, deadline);
    if (refusals.passes(0, raw))
      if (auto secret = parse_secret(raw, size); secret && secret->tokens[rank] == token)
        return *secret;
    if (deadline.passed())
      throw TransportError(
          "rank 0 has not joined the group after " + std::to_string(deadline.elapsed_seconds()) +
              " s; the secret in the rendezvous store does not admit this rank: it is an "
              "earlier group's, or rank 0 died before it admitted this rank",
          0);
    std::this_thread::sleep_for(pause.next(deadline));
  }
}

void refuse_to_join(Rendezvous& store, Rank rank, bool usage, std::string reason) {
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  store.set(refusal_key(rank),
            kRefusal + (usage ? kUsage : "") + "rank " + std::to_string(rank) + ": " + reason);
}

void check_refusal_of(Rendezvous& store, Rank rank) {
  check_refusal(store.get(refusal_key(rank), Deadline(std::chrono::seconds(5))));
}

std::vector<Identity> roll_call(Rendezvous& store, const Identity& mine, GroupSecret& secret,
                                const Deadline& deadline) {
  const Rank size = static_cast<Rank>(secret.tokens.size());
  store.set(group_key(secret.group, "rank", mine.rank), serialize(mine));
  Refusals refusals;
  // Rank 0 lets in whoever has said hello; any rank hears of one that refused.
  const auto look_around = [&](Rank awaited) {
    bool news = false;
    for (Rank rank = 0; rank < size; ++rank) {
      if (rank == mine.rank || (mine.rank != 0 && rank != awaited)) continue;
      if (!store.has(refusal_key(rank))) continue;
      const std::string value = store.get(refusal_key(rank), deadline);
      if (!refusals.passes(rank, value) || mine.rank != 0) continue;
      const wire::Nonce token = token_from(value);
      news |= token != secret.tokens[rank];
      secret.tokens[rank] = token;
    }
    if (news) store.set(kSecretKey, serialize(secret));
  };
  std::vector<Identity> all;
  const auto identity_of = [&](Rank rank) {
    const std::string key = group_key(secret.group, "rank", rank);
    for (Pause pause; !store.has(key) && !deadline.passed();) {
      look_around(rank);
      // The one that is awaited may wait for one that has died.
      for (const Identity& known : all) check_alive(mine, known);
      std::this_thread::sleep_for(pause.next(deadline));
    }
    return parse_identity(get_from(store, key, rank, deadline), rank);
  };
  for (Rank rank = 0; rank < size; ++rank)
    all.push_back(rank == mine.rank ? mine : identity_of(rank));
  check_agreement(all);
  return all;
}

}  // namespace qcoll::transport
