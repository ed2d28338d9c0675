// A bound function's arguments are listed once, as ARGUMENT(type, name) in a macro. From the list come the members of a call, the
// parameters of the function, and what the library tells of them (`arguments`): etap_backend/calls.py is compared with that.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include "api/checks.h"

namespace etap {

#define ETAP_MEMBER(type, name) const type& name;
#define ETAP_TYPE(type, name) , type
#define ETAP_TOLD(type, name) std::string(kind_of<type>) + " " #name,

// As torch's schemas call it.
template <class T>
constexpr const char* kind_of = nullptr;
template <>
inline constexpr const char* kind_of<TensorView> = "Tensor";
template <>
inline constexpr const char* kind_of<Optional<TensorView>> = "Tensor?";
template <>
inline constexpr const char* kind_of<int64_t> = "int";
template <>
inline constexpr const char* kind_of<double> = "float";
template <>
inline constexpr const char* kind_of<bool> = "bool";

// The bound function that makes a Call of its arguments and hands it to an action.
template <class Call, class... Arguments>
struct Bound {
  template <auto kAction>
  static auto run(Arguments... arguments) {
    return kAction(Call{arguments...});
  }
};

}  // namespace etap
