#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct dispatch_queue_s *dispatch_queue_t;
typedef struct dispatch_queue_attr_s *dispatch_queue_attr_t;
typedef struct dispatch_data_s *dispatch_data_t;
typedef void (*dispatch_function_t)(void *);

#define DISPATCH_QUEUE_SERIAL ((dispatch_queue_attr_t)0)

#ifdef __cplusplus
extern "C" {
#endif

dispatch_queue_t dispatch_queue_create(const char *label, dispatch_queue_attr_t attr);
const char *dispatch_queue_get_label(dispatch_queue_t queue);
void dispatch_sync_f(dispatch_queue_t queue, void *context, dispatch_function_t work);
void dispatch_assert_queue(dispatch_queue_t queue);

// In Apple's headers, these are macros that send messages, in Objective-C too. Here a queue lives as long as the
// process.
#ifdef __OBJC__
#define dispatch_retain(object) ((void)(object))
#define dispatch_release(object) ((void)(object))
#endif

#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#endif

#ifdef __cplusplus
}
#endif
