#pragma once
#import <Foundation/Foundation.h>

@interface MTLCaptureManager : NSObject
@end
