#pragma once

#include "common/port.cuh"

namespace fa {

struct CrossEntropyParams {
  float* logits;             // [tokens, classes]; gradients afterwards, where factor is given
  const int64_t* target;     // [tokens]
  const void* class_weight;  // [classes] or null
  const float* weight_sum;   // [1]: of class_weight; or null
  const float* factor;       // [tokens] of the gradients; or null: no gradients
  float* loss;               // [tokens], as nll and lse
  float* nll;
  float* lse;
  int64_t tokens;
  int64_t logits_row;
  int64_t target_stride;
  int64_t ignore_index;
  int32_t classes;
  int32_t weight_type;  // ElementType
  float a;              // of the formula
  float b;
};

}  // namespace fa
