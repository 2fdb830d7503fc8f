#pragma once
#import <Foundation/Foundation.h>

@protocol MTLDevice;

typedef NS_ENUM(NSUInteger, MTLLanguageVersion) {
  MTLLanguageVersion2_0 = 131072,
  MTLLanguageVersion2_1 = 131073,
  MTLLanguageVersion2_2 = 131074,
  MTLLanguageVersion2_3 = 131075,
  MTLLanguageVersion2_4 = 131076,
  MTLLanguageVersion3_0 = 196608,
  MTLLanguageVersion3_1 = 196609,
  MTLLanguageVersion3_2 = 196610,
  MTLLanguageVersion4_0 = 262144,
};

typedef NS_ENUM(NSInteger, MTLMathMode) {
  MTLMathModeSafe = 0,
  MTLMathModeRelaxed = 1,
  MTLMathModeFast = 2,
};

typedef NS_ENUM(NSInteger, MTLMathFloatingPointFunctions) {
  MTLMathFloatingPointFunctionsFast = 0,
  MTLMathFloatingPointFunctionsPrecise = 1,
};

typedef NS_ENUM(NSUInteger, MTLLibraryError) {
  MTLLibraryErrorUnsupported = 1,
  MTLLibraryErrorInternal = 2,
  MTLLibraryErrorCompileFailure = 3,
  MTLLibraryErrorCompileWarning = 4,
  MTLLibraryErrorFunctionNotFound = 5,
  MTLLibraryErrorFileNotFound = 6,
};

typedef NS_ENUM(NSUInteger, MTLDataType) {
  MTLDataTypeNone = 0,
  MTLDataTypeFloat = 3,
  MTLDataTypeFloat2 = 4,
  MTLDataTypeFloat3 = 5,
  MTLDataTypeFloat4 = 6,
  MTLDataTypeHalf = 16,
  MTLDataTypeHalf2 = 17,
  MTLDataTypeHalf3 = 18,
  MTLDataTypeHalf4 = 19,
  MTLDataTypeInt = 29,
  MTLDataTypeInt2 = 30,
  MTLDataTypeInt3 = 31,
  MTLDataTypeInt4 = 32,
  MTLDataTypeUInt = 33,
  MTLDataTypeUInt2 = 34,
  MTLDataTypeUInt3 = 35,
  MTLDataTypeUInt4 = 36,
  MTLDataTypeShort = 37,
  MTLDataTypeUShort = 41,
  MTLDataTypeChar = 45,
  MTLDataTypeUChar = 49,
  MTLDataTypeBool = 53,
  MTLDataTypeLong = 81,
  MTLDataTypeULong = 85,
  MTLDataTypeBFloat = 121,
};

FOUNDATION_EXPORT NSErrorDomain const MTLLibraryErrorDomain;

@interface MTLCompileOptions : NSObject <NSCopying> {
  NSDictionary *_preprocessorMacros;
  MTLLanguageVersion _languageVersion;
  MTLMathMode _mathMode;
  MTLMathFloatingPointFunctions _mathFloatingPointFunctions;
}
@property(readwrite, copy, nonatomic) NSDictionary<NSString *, NSObject *> *preprocessorMacros;
@property(readwrite, nonatomic) BOOL fastMathEnabled;
@property(readwrite, nonatomic) MTLMathMode mathMode;
@property(readwrite, nonatomic) MTLMathFloatingPointFunctions mathFloatingPointFunctions;
@property(readwrite, nonatomic) MTLLanguageVersion languageVersion;
@end

@interface MTLFunctionConstantValues : NSObject <NSCopying> {
  void *_values;
}
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index;
- (void)reset;
@end

@protocol MTLFunction <NSObject>
@property(copy, atomic) NSString *label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSString *name;
@end

@protocol MTLLibrary <NSObject>
@property(copy, atomic) NSString *label;
@property(readonly) id<MTLDevice> device;
- (id<MTLFunction>)newFunctionWithName:(NSString *)functionName;
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)constantValues
                                 error:(NSError **)error;
@property(readonly) NSArray<NSString *> *functionNames;
@end
