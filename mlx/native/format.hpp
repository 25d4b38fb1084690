// Stands in for std::format with plain {} fields, because mlx-c uses it and gcc 12 does not ship <format>.
#pragma once

#include <version>

#if __has_include(<format>)
#include <format>
#else

#include <sstream>
#include <string>
#include <string_view>

namespace std {

inline void format_rest(ostringstream& out, string_view text) {
  out << text;
}

template <typename First, typename... Rest>
void format_rest(ostringstream& out, string_view text, const First& first, const Rest&... rest) {
  const auto field = text.find("{}");
  out << text.substr(0, field);
  if (field == string_view::npos) {
    return;
  }
  out << first;
  format_rest(out, text.substr(field + 2), rest...);
}

template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  format_rest(out, text, args...);
  return out.str();
}

} // namespace std

#endif
