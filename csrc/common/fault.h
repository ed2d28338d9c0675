// Marks where tests plant faults. A build with -DETAP_FAULT=name leaves the statement of that name out, or takes the other
// expression; every other build has them as they stand.
#pragma once

#ifdef ETAP_FAULT
#define ETAP_TEXT(name) #name
#define ETAP_TEXT_OF(macro) ETAP_TEXT(macro)

namespace etap {
constexpr bool is_planted(const char* name) {
  const char* planted = ETAP_TEXT_OF(ETAP_FAULT);
  for (; *name != 0 && *name == *planted; ++name, ++planted) {
  }
  return *name == *planted;
}
}  // namespace etap

#define ETAP_UNLESS_FAULT(name, ...)            \
  do {                                          \
    if constexpr (!::etap::is_planted(#name)) { \
      __VA_ARGS__;                              \
    }                                           \
  } while (0)
#define ETAP_OR_FAULT(name, expression, fault) (::etap::is_planted(#name) ? (fault) : (expression))
#else
#define ETAP_UNLESS_FAULT(name, ...) __VA_ARGS__
#define ETAP_OR_FAULT(name, expression, fault) (expression)
#endif
