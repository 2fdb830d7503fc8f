#pragma once
#import <Foundation/Foundation.h>

@protocol MTLHeap <NSObject>
@property(copy, atomic) NSString *label;
@end
