// Names for statements, so that tests can leave one out and see that it is missed. A build with -DETAP_MARKS puts a begin and
// an end around each, which PTX keeps; in every other build the statement stands as it is written.
#pragma once

#ifdef ETAP_MARKS
#define ETAP_MARKED(name, ...)                                   \
  do {                                                           \
    asm volatile(".pragma \"begin " #name "\";" ::: "memory");   \
    __VA_ARGS__;                                                 \
    asm volatile(".pragma \"end " #name "\";" ::: "memory");     \
  } while (0)
#else
#define ETAP_MARKED(name, ...) __VA_ARGS__
#endif
